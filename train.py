"""The run, top to bottom: config, mesh, model, optimizer, accumulate, step, record.

torchrun --standalone --nproc-per-node=2 train.py tiny --run.steps 200
python train.py --help
"""

from megacpp.arguments import Resolved, parse_or_exit

# Before torch is imported and long before a process group starts: --help and mistakes end here.
RESOLVED = parse_or_exit("train.py") if __name__ == "__main__" else None

import time
from functools import partial
from pathlib import Path

from checkpointing.apply import Keeper
from checkpointing.fp8 import check_fp8_device
from checkpointing.watch import StepWatch
from megacpp.data.batches import Corpus
from megacpp.data.loader import Loader
from megacpp.data.schedule import batch_schedule
from megacpp.run.evaluate import evaluate, validation_share
from megacpp.run.expert_load import LoadWatch, load_figures
from megacpp.run.failure import guarded
from megacpp.run.final import export_final, write_sample
from megacpp.run.forensics import Forensics
from megacpp.run.gate import set_allocator
from megacpp.run.goodput import Goodput
from megacpp.run.health import Health, budget_spent
from megacpp.run.kernel_check import verify_kernels
from megacpp.run.kernels import choices
from megacpp.run.launch import announce, check_corpus, set_aside
from megacpp.run.measured import Calibrator
from megacpp.run.metrics import MetricsLog, StepRecord, bits_per_byte, peak_memory_bytes
from megacpp.run.precision import check_device
from megacpp.run.settle import settle
from megacpp.state.training import TrainingState
from optim.build import build_optimizer, describe
from optim.clip import clip_gradients
from optim.qk_clip import QKClip
from optim.schedule import build_scheduler, lr_multiplier
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import pick_device, start, world_size
from parallel.verdict import Verdict


def main(resolved: Resolved) -> None:
    # ---- config and data: what can be wrong is found before ranks meet ---------------------------
    config = resolved.config
    folder = Path(config.run.dir)
    corpus = Corpus(config.data.path, config.data.seq_len, config.run.seed)
    check_corpus(config, corpus)

    # ---- mesh, model (meta device, shard, materialise), optimizer --------------------------------
    device = pick_device(config.train.device)
    check_device(config, device)
    check_fp8_device(config, device)
    kernels = choices(config, device)
    resolved, admission = settle(resolved, world_size(), device)
    config = resolved.config
    set_allocator(config, device)
    agreed = verify_kernels(config, device, kernels)
    world = start(config.mesh, device)
    if world.is_main:
        set_aside(config)
    retried_s = sum(a["wall_s"] for a in admission.attempts if a["outcome"] == "oom")
    clock = Goodput(folder, world.is_main, config.train.compile != "off", retried_s)
    keeper = Keeper(config, device)
    model = build_model(config, world, keeper)
    optimizer = build_optimizer(model, config, world.holders)
    boundary = AccumulationBoundary(model, world, config)
    tau, of_all = config.optim.qk_clip, lambda values: world.max(values, "world")
    qk_clip = QKClip(model, tau, of_all) if tau else None

    # ---- rows, saved state, schedules, header, records -------------------------------------------
    batches, _ = batch_schedule(config, world.size)
    share = world.coordinate("batch"), world.degree("batch")
    loader, health = Loader(corpus, *share, config.train.device_batch_size), Health()
    counters = {"health": health, "loss_scale": boundary.loss_scale}
    state = TrainingState(
        folder / "checkpoints", model, optimizer, config, corpus.fingerprint, loader, counters
    )
    with clock.span("checkpoint"):
        state.resume(config.checkpoint.resume)
    scheduler = build_scheduler(optimizer, config.optim, config.run.steps, state.updates)
    mfu = announce(
        resolved,
        corpus,
        describe(model, config),
        state.step,
        state.changed,
        world.degrees,
        device,
        world.is_main,
        keeper.compiled,
        keeper.words(),
        kernels,
        agreed,
        admission,
    )
    log = MetricsLog(folder, config.run, state.step, active=world.is_main)
    calibrator = Calibrator(admission, model, optimizer, device, of_all, world.is_main)
    smoke = config.memory.fit == "smoke"  # a candidate's few steps: nothing of them is kept
    held_out = validation_share(corpus, config, *share)
    balance = LoadWatch(config.model.moe.load_warning)
    watch = partial(StepWatch, model, optimizer)
    forensics = Forensics(folder, config, world.rank, device, watch, state.step)

    # ---- the loop --------------------------------------------------------------------------------
    for step in range(state.step, config.run.steps):
        began = time.perf_counter()
        clock.step(step)
        forensics.begin(step)
        grad_accum, scale = batches.accum(step), boundary.loss_scale.value
        lr = config.optim.lr * lr_multiplier(state.updates, config.run.steps, config.optim)
        sums = boundary.accumulate(clock.reading(loader.take(grad_accum)), step)
        norm = clip_gradients(
            model,
            config.optim.clip_norm,
            copies=boundary.copies,
            along=sums.along,
            loss_scale=scale,
        )
        verdict, logits = boundary.judge(sums, norm), None
        if verdict.healthy:
            optimizer.step()
            logits = qk_clip.clip() if qk_clip else None
            scheduler.step()
        elif qk_clip:
            qk_clip.reset()
        optimizer.zero_grad()
        boundary.conclude(verdict)
        state.advance(verdict.healthy, good=verdict.healthy and verdict.clean)

        step_s = time.perf_counter() - began
        log.warn(forensics.end(step))
        if verdict.healthy:
            log.warn(health.observe(step, verdict.loss, verdict.grad_norm))
            log.warn(balance.observe(step, verdict.loads))
        if verdict.trouble:
            fate = "left out" if not verdict.healthy else "taken with zeros instead"
            where = boundary.where() or "nobody's gradients before they were summed"
            log.warn([f"step {step + 1}: {fate}: {verdict.trouble} ({where})"])
        record = StepRecord(
            step=step,
            loss=verdict.loss,
            bits_per_byte=bits_per_byte(verdict.nll_sum, verdict.target_bytes),
            grad_norm=verdict.grad_norm,
            lr=lr,
            tokens=sums.tokens,
            valid_tokens=verdict.valid_tokens,
            tokens_per_s=sums.tokens / step_s,
            step_s=step_s,
            peak_bytes=peak_memory_bytes(world.device),
            grad_accum=grad_accum,
            nonfinite=verdict.nonfinite,
            skipped=not verdict.healthy,
            mfu=mfu(sums.tokens / step_s),
            more=further_figures(verdict, health, scale if boundary.loss_scale.dynamic else None)
            | (logits.figures() if logits else {})
            | load_figures(verdict.loads),
        )
        log.write(record)
        log.warn(calibrator.after_step(updated=verdict.healthy))
        if state.bad_steps >= config.train.max_skips:
            raise budget_spent(config, state.saved)
        last = step + 1 == config.run.steps and not smoke
        if last or (due(config.checkpoint.every, step) and not state.bad_steps):
            with clock.span("checkpoint"):
                state.save(0 if state.bad_steps else config.checkpoint.keep)  # 0: drops no older
        if due(config.run.eval_every, step) and step + 1 < config.run.steps:
            with clock.span("evaluation"):
                log.evaluation(step, evaluate(boundary.evaluate, held_out, corpus))

    # ---- the end: held-out loss next to gzip, final weights, a sample ----------------------------
    if not smoke:
        with clock.span("evaluation"):
            log.evaluation(state.step - 1, evaluate(boundary.evaluate, held_out, corpus))
    clock.idle()
    if not smoke:
        export_final(model, corpus, config, folder)
    if world.is_main and not smoke:
        print(f"---- sample ----\n{write_sample(corpus, config, folder, world.device)}\n----")
        print(f"run folder: {folder}   more text: megacpp sample {folder} --prompt '...'")
    forensics.close(lambda table: world.sum(table, "world"), world.size)
    log.close()
    clock.close()
    world.close()


def further_figures(
    verdict: Verdict, health: Health, loss_scale: float | None
) -> dict[str, float | None]:
    """What a record holds beside the figures of every run, for metrics.jsonl and TensorBoard."""
    found = {f"aux_{term}": value for term, value in verdict.auxiliary.items()}
    compared = health.figures() if verdict.healthy else {}
    return (
        found
        | compared
        | {
            "aux_gradient_ratio": verdict.auxiliary_ratio,
            "loss_scale": loss_scale,
        }
    )


def due(every: int, step: int) -> bool:
    """Whether a thing that happens every `every` steps (0: never) happens after this one."""
    return every > 0 and (step + 1) % every == 0


if __name__ == "__main__":
    assert RESOLVED is not None
    guarded(main, RESOLVED)
