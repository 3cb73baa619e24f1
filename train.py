"""The run, top to bottom: config, mesh, model, optimizer, accumulate, step, record.

torchrun --standalone --nproc-per-node=2 train.py tiny --run.steps 200
python train.py --help
"""

from megacpp.arguments import Resolved, parse_or_exit

# Before torch is imported and long before a process group starts: --help and mistakes end here.
RESOLVED = parse_or_exit("train.py") if __name__ == "__main__" else None

import math
import time
from pathlib import Path

from megacpp.data.batches import Corpus
from megacpp.errors import NonFiniteError
from megacpp.run.evaluate import evaluate, validation_share
from megacpp.run.failure import guarded
from megacpp.run.final import export_final, write_sample
from megacpp.run.launch import announce, check_corpus, set_aside
from megacpp.run.metrics import MetricsLog, StepRecord, bits_per_byte, peak_memory_bytes
from megacpp.run.precision import check_precision
from megacpp.state.training import TrainingState
from optim.build import build_optimizers
from optim.clip import clip_gradients
from optim.schedule import lr_multiplier
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import micro_rows, pick_device, start

MOST_SKIPS = 10  # steps in a row without a finite gradient before the run gives up


def main(resolved: Resolved) -> None:
    # ---- config and data: what can be wrong is found before ranks meet ---------------------------
    config = resolved.config
    folder = Path(config.run.dir)
    corpus = Corpus(config.data.path, config.data.seq_len, config.run.seed)
    check_corpus(config, corpus)

    # ---- mesh, model (meta device, shard, materialise), optimizer --------------------------------
    device = pick_device(config.train.device)
    check_precision(config.precision, device)
    world = start(config.mesh, device)
    if world.is_main:
        set_aside(config)
    model = build_model(config, world)
    optimizers = build_optimizers(model, config, world.holders)
    boundary = AccumulationBoundary(model, world, config)

    # ---- saved state, header, records ------------------------------------------------------------
    state = TrainingState(folder / "checkpoints", model, optimizers, config, corpus.fingerprint)
    state.resume(config.checkpoint.resume)
    lines = optimizers.describe()
    mfu = announce(
        resolved, corpus, lines, state.step, state.changed, world.degrees, device, world.is_main
    )
    log = MetricsLog(folder, config.run, state.step, active=world.is_main)
    held_out = validation_share(corpus, config, world.coordinate("batch"), world.degree("batch"))

    # ---- the loop --------------------------------------------------------------------------------
    rows_per_step = config.train.tokens_per_step // config.data.seq_len
    skips = 0
    for step in range(state.step, config.run.steps):
        began = time.perf_counter()
        rows = corpus.rows_for(step, rows_per_step)
        shares = micro_rows(rows, world, config.train.device_batch_size)
        sums = boundary.accumulate([corpus.train_batch(share) for share in shares])
        grad_norm = clip_gradients(model, config.optim.clip_norm, copies=boundary.copies).item()
        healthy = math.isfinite(grad_norm)
        multiplier = lr_multiplier(state.updates, config.run.steps, config.optim)
        if healthy:
            optimizers.step(multiplier)
        optimizers.zero_grad()
        boundary.update_routers(healthy)
        state.advance(updated=healthy)

        nll, step_s = sums.nll_sum.item(), time.perf_counter() - began
        record = StepRecord(
            step=step,
            loss=nll / max(1, sums.valid_tokens),
            bits_per_byte=bits_per_byte(nll, sums.target_bytes),
            grad_norm=grad_norm,
            lr=config.optim.lr * multiplier,
            tokens=sums.tokens,
            valid_tokens=sums.valid_tokens,
            tokens_per_s=sums.tokens / step_s,
            step_s=step_s,
            peak_bytes=peak_memory_bytes(world.device),
            skipped=not healthy,
            mfu=mfu(sums.tokens / step_s),
        )
        log.write(record)
        skips = 0 if healthy else skips + 1
        if skips == MOST_SKIPS:
            raise NonFiniteError(
                f"optim.lr={config.optim.lr}: {skips} steps in a row had no finite gradient. "
                "Fix: lower it, or raise optim.warmup_steps."
            )
        if due(config.checkpoint.every, step) or step + 1 == config.run.steps:
            state.save(config.checkpoint.keep)
        if due(config.run.eval_every, step) and step + 1 < config.run.steps:
            log.evaluation(step, evaluate(boundary.evaluate, held_out, corpus))

    # ---- the end: held-out loss next to gzip, final weights, a sample ----------------------------
    log.evaluation(state.step - 1, evaluate(boundary.evaluate, held_out, corpus))
    export_final(model, corpus, config, folder)
    if world.is_main:
        print(f"---- sample ----\n{write_sample(corpus, config, folder, world.device)}\n----")
        print(f"run folder: {folder}   more text: megacpp sample {folder} --prompt '...'")
    log.close()
    world.close()


def due(every: int, step: int) -> bool:
    """Whether a thing that happens every `every` steps (0: never) happens after this one."""
    return every > 0 and (step + 1) % every == 0


if __name__ == "__main__":
    assert RESOLVED is not None
    guarded(main, RESOLVED)
