"""Training run, top to bottom: config, mesh, model, optimizer, accumulate, step, record.

torchrun --standalone --nproc-per-node=2 train.py tiny --run.steps 200
python train.py --help
"""

import gc

gc.disable()  # imports make a million objects, and collections would traverse them all

from megacpp.config.arguments import Resolved, parse_or_exit
from megacpp.home import put_first

put_first()  # `parallel`, `optim` and `checkpointing` below are this checkout's, from any folder

# Before torch is imported and long before a process group starts: --help and mistakes end here.
RESOLVED = parse_or_exit("train.py") if __name__ == "__main__" else None

from functools import partial
from pathlib import Path

from checkpointing.apply import ActivationCheckpointing
from checkpointing.fp8 import check_fp8_device
from checkpointing.tracing.watch import StepWatch
from megacpp.config.batch_schedule import batch_schedule
from megacpp.data.loader import Loader
from megacpp.errors import PreemptedError
from megacpp.launch.folder import open_folder, start_point
from megacpp.launch.start import announce, prepare
from megacpp.run.evaluate import HeldOut
from megacpp.run.failure import guarded
from megacpp.run.final import finish
from megacpp.run.goodput import Goodput
from megacpp.run.hang import group_timeout
from megacpp.run.health import Health
from megacpp.run.metrics import MetricsLog
from megacpp.run.preemption import StopRequest
from megacpp.run.rank_store import RankStore
from megacpp.run.records import open_records
from megacpp.run.rewind import Rewinds
from megacpp.state.digests import Digests
from megacpp.state.training import TrainingState
from optim.build import build_optimizer, describe, learning_rates
from optim.clip import clip_gradients
from optim.qk_clip import QKClip
from optim.schedule import build_scheduler, lr_multiplier
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model, local_part
from parallel.mesh import pick_device, start

gc.freeze()
gc.enable()


def main(resolved: Resolved, peers: RankStore) -> None:
    """Train a resolved configuration from its last checkpoint to its last step.

    Raises:
        PreemptedError: SIGTERM or SIGHUP arrived; the state after that step is saved.
        NonFiniteError: more than `train.max_skips` steps in a row were left out.
    """
    # ---- config, data, kernels, memory: what can be wrong is found before ranks meet -------------
    with peers.agree("start"):  # a node's error ends all of them
        device = pick_device(resolved.config.train.device)
        check_fp8_device(resolved.config, device)
        launch = prepare(resolved, peers, device)
    config, corpus, folder = launch.config, launch.corpus, Path(launch.config.run.dir)
    stop = StopRequest()  # SIGTERM, SIGHUP: save after this step and leave
    until = config.run.until or config.run.steps
    kept = config.memory.fit != "smoke" and not config.run.until  # or a trial's, a replay's steps

    # ---- mesh, model (meta device, shard, materialise), optimizer, boundary ----------------------
    open_folder(peers, config, corpus.fingerprint)
    world = start(config.mesh, device, peers.store, group_timeout(config.run.timeout))
    of_all, of_sum = partial(world.max, axis="world"), partial(world.sum, axis="world")
    clock = Goodput(folder, world.is_main, config.train.compile != "off", launch.retried_s)
    peers.clock = clock  # phases, for the watch over hangs (guarded)
    say = partial(print, flush=True) if world.is_main else None
    ac = ActivationCheckpointing(config, device, say=say)
    model = build_model(config, world, ac)
    optimizer = build_optimizer(model, config, world.holders)
    boundary = AccumulationBoundary(model, world, config, stop)
    qk_clip = QKClip(model, config.optim.qk_clip, of_all) if config.optim.qk_clip else None

    # ---- rows, saved state, schedules ------------------------------------------------------------
    batches, _ = batch_schedule(config, world.size)
    share = world.coordinate("batch"), world.degree("batch")
    loader, health = Loader(corpus, *share, config.train.device_batch_size), Health()
    counters, saved = {"health": health, "loss_scale": boundary.loss_scale}, folder / "checkpoints"
    counters |= corpus.counters
    state = TrainingState(saved, model, optimizer, config, corpus.fingerprint, loader, counters)
    with clock.span("checkpoint"):
        state.resume(start_point(peers, config))
        if config.checkpoint.init and state.saved is None:
            from megacpp.interop.start import start_from  # every map of names

            state.changed += start_from(model, config, local_part(world))
    scheduler = build_scheduler(optimizer, config.optim, config.run.steps, state.updates)

    # ---- header, records -------------------------------------------------------------------------
    seen = describe(model, config), ac.compiled, ac.words(), state.step, state.changed
    mfu = announce(launch, world.degrees, world.is_main, *seen)
    log = MetricsLog(folder, config, state.step, world.is_main)
    rewinds = Rewinds(folder, config, state, health, log, world.is_main)
    copies = Digests(folder, state.tensors, config, device)
    watch = partial(StepWatch, model, optimizer)
    records = open_records(launch, log, health, world.rank, of_all, mfu, boundary.where, watch)
    held_out = HeldOut(corpus, config, share, boundary.evaluate, log)

    # ---- the loop --------------------------------------------------------------------------------
    while (step := state.step) < until:
        clock.step(step)
        records.begin(step)
        lr = config.optim.lr * lr_multiplier(state.updates, config.run.steps, config.optim)
        rates, grad_accum = learning_rates(optimizer), batches.accum(step)
        corpus.begin_step(step, loader.position)
        sums = boundary.accumulate(clock.reading(loader.take(grad_accum)), step)
        norm = clip_gradients(
            model,
            config.optim.clip_norm,
            copies=boundary.copies,
            along=sums.along,
            loss_scale=boundary.loss_scale.value,
        )
        status = boundary.check_step(sums, norm)
        if status.healthy:
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        logits = qk_clip.after_step(status.healthy) if qk_clip else {}
        boundary.finish_step(status)
        state.advance(status.healthy, good=status.healthy and status.clean)
        read = {"tokens": sums.tokens, "grad_accum": grad_accum}
        records.end(step, status, **read, lr=lr, rates=rates, figures=logits)

        if rewinds.due(copies.difference(step)):
            with clock.span("checkpoint"):
                rewinds.go_back()
            scheduler = build_scheduler(optimizer, config.optim, config.run.steps, state.updates)
            continue
        last = step + 1 == config.run.steps
        saves = due(config.checkpoint.every, step) and not state.bad_steps
        if kept and (last or status.leaving or saves):
            with clock.span("checkpoint"):
                state.save(config.checkpoint.keep)
        if status.leaving:
            records.close(of_sum, world.size)
            raise PreemptedError(f"stopped by {stop.heard or 'SIGTERM'} after step {step + 1}")
        if due(config.run.eval_every, step) and not last:
            with clock.span("evaluation"):
                held_out.evaluate(step)

    # ---- the end: held-out loss next to gzip, final weights, a sample ----------------------------
    clock.idle()
    if kept:
        with clock.span("evaluation"):
            loss = held_out.evaluate(state.step - 1)
        finish(model, corpus, config, log, state.step, loss)
    records.close(of_sum, world.size)
    clock.close()
    world.close()


def due(every: int, step: int) -> bool:
    """Whether a thing that happens every `every` steps (0: never) happens after this one."""
    return every > 0 and (step + 1) % every == 0


if __name__ == "__main__":
    assert RESOLVED is not None
    guarded(main, RESOLVED)
