"""Training run, top to bottom: config, mesh, model, optimizer, accumulate, step, record.

torchrun --standalone --nproc-per-node=2 train.py tiny --run.steps 200  # or: train.py --help
"""

import gc

gc.disable()  # imports make a million objects, and collections would traverse them all

from megacpp.config.arguments import Resolved, parse_or_exit
from megacpp.home import put_first

put_first()  # `parallel`, `optim` and `checkpointing` below are this checkout's, from any folder

# Before torch is imported and long before a process group starts: --help and mistakes end here.
RESOLVED = parse_or_exit("train.py") if __name__ == "__main__" else None

from functools import partial

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.watch import StepWatch
from megacpp.data.loader import Loader
from megacpp.launch.start import announce, prepare
from megacpp.run.failure import guarded
from megacpp.run.rank_store import RankStore
from megacpp.run.records import Records, due
from megacpp.state.training import TrainingState
from optim.build import build_optimizer, describe, learning_rates, peak_rates
from optim.clip import clip_gradients
from optim.qk_clip import QKClip
from optim.schedule import build_scheduler, lr_multiplier
from parallel.audit import build_boundary
from parallel.build import build_model, load_first_weights
from parallel.start import pick_device, start

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
        launch = prepare(resolved, peers, device)
    config, corpus = launch.config, launch.corpus
    records = Records(launch, peers)
    clock = records.clock

    # ---- mesh, model (meta device, shard, materialise), optimizer, boundary ----------------------
    launch.open_folder()
    world = start(config.mesh, device, peers.store, launch.timeout)
    of_all, of_sum = partial(world.max, axis="world"), partial(world.sum, axis="world")
    ac = ActivationCheckpointing(config, device, say=records.say)
    model = build_model(config, world, ac)
    optimizer = build_optimizer(model, config, world.holders)
    boundary = build_boundary(model, world, config, records.stop)
    qk_clip = QKClip(model, config.optim.qk_clip, of_all) if config.optim.qk_clip else None

    # ---- rows, saved state, schedule, header, records --------------------------------------------
    share = world.coordinate("batch"), world.degree("batch")
    loader = Loader(corpus, *share, config.train.device_batch_size)
    counters = {"health": records.health, "loss_scale": boundary.loss_scale} | corpus.counters
    saved = launch.folder / "checkpoints"
    state = TrainingState(saved, model, optimizer, config, corpus.fingerprint, loader, counters)
    with clock.span("checkpoint"):
        state.resume(launch.start_point())
        if state.resumed is None:
            state.changed += load_first_weights(model, config, world)
    peaks = peak_rates(optimizer)
    scheduler = build_scheduler(optimizer, config.optim, config.run.steps, state.updates)
    seen = describe(model, config), ac.compiled, ac.words(), state.step, state.changed
    mfu = announce(launch, world.degrees, world.is_main, *seen)
    watch = partial(StepWatch, model, optimizer)
    records.open(state, share, boundary.evaluate, boundary.where, mfu, watch, of_all, of_sum)

    # ---- the loop --------------------------------------------------------------------------------
    while (step := state.step) < (config.run.until or config.run.steps):
        records.begin(step)
        factor = lr_multiplier(state.updates, config.run.steps, config.optim)
        rates, grad_accum = learning_rates(optimizer, peaks, factor), launch.batches.accum(step)
        corpus.begin_step(step, loader.position)
        sums = boundary.accumulate(clock.reading(loader.take(grad_accum)), step)
        params, copies, scale = boundary.params, boundary.copies, boundary.loss_scale.value
        norm = clip_gradients(params, config.optim.clip_norm, copies, sums.along, scale)
        if qk_clip:
            qk_clip.measure()
        with loader.ahead(step + 1, launch.batches.accum(step + 1), clock.part("data")):
            status = boundary.check_step(sums, norm)
        if status.healthy:
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        logits = qk_clip.after_step(status.healthy) if qk_clip else {}
        boundary.finish_step(status)
        state.advance(status.healthy, good=status.good)
        records.end(step, status, grad_accum=grad_accum, factor=factor, rates=rates, figures=logits)
        if records.must_go_back(step):
            records.go_back()
            scheduler = build_scheduler(optimizer, config.optim, config.run.steps, state.updates)
            continue
        last = step + 1 == config.run.steps
        saves = due(config.checkpoint.every, step) and not state.bad_steps
        if config.saves and (last or status.leaving or saves):
            with clock.span("checkpoint"):
                state.save(config.checkpoint.keep, behind=not (last or status.leaving))
        if status.leaving:
            raise records.stopped(step)
        if state.mirror and due(config.checkpoint.mirror_every, step) and not state.bad_steps:
            state.mirror.copy(state)
        if due(config.run.eval_every, step) and not last:
            records.evaluate(step)
        if due(config.run.tasks_every, step) and not last:
            records.run_tasks(step)

    # ---- the end: held-out loss next to gzip, final weights, a sample ----------------------------
    clock.idle()
    if config.saves:
        records.finish(model, records.evaluate(state.step - 1))
    records.close()
    world.close()


if RESOLVED is not None:
    guarded(main, RESOLVED)
