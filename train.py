"""The run, top to bottom: config, mesh, model, parallelize, optimizer, accumulate, step, record.

torchrun --standalone --nproc-per-node=2 train.py tiny --run.steps 200
python train.py --help
"""

import sys

from megacpp.arguments import Resolved, exit_on_error, parse_or_exit

# Before torch is imported and long before a process group starts: --help and mistakes end here.
RESOLVED = parse_or_exit("train.py") if __name__ == "__main__" else None

import time
from pathlib import Path

import torch

from megacpp.data.batches import Corpus
from megacpp.errors import MegacppError, NonFiniteError
from megacpp.run.evaluate import evaluate
from megacpp.run.final import finish
from megacpp.run.launch import announce, check_corpus
from megacpp.run.metrics import MetricsLog, StepRecord, bits_per_byte, peak_memory_bytes
from megacpp.state.training import TrainingState
from optim.build import build_optimizers
from optim.clip import clip_gradients
from optim.schedule import lr_multiplier
from parallel.boundary import AccumulationBoundary
from parallel.build import autocast_dtype, build_model
from parallel.mesh import micro_rows, pick_device, start

SKIPS_ALLOWED = 10  # in a row


def main(resolved: Resolved) -> None:
    # ---- config and data: everything that can be wrong is found before ranks meet -------------
    config = resolved.config
    folder = Path(config.run.dir)
    corpus = Corpus(config.data.path, config.data.seq_len, config.run.seed)
    check_corpus(config, corpus)

    # ---- mesh ----------------------------------------------------------------------------------
    world = start(config.mesh, pick_device(config.train.device))

    # ---- model: built on the meta device, sharded, then materialised ---------------------------
    model = build_model(config, world)

    # ---- optimizer, boundary, saved state ------------------------------------------------------
    optimizers = build_optimizers(model, config)
    boundary = AccumulationBoundary(model, world, autocast_dtype(config, world))
    state = TrainingState(folder / "checkpoints", model, optimizers, config)
    state.resume(config.checkpoint.resume)
    utilisation = announce(resolved, corpus, world, optimizers.describe(), state.step)
    log = MetricsLog(folder, config.run, state.step, active=world.is_main)

    # ---- the loop ------------------------------------------------------------------------------
    rows_per_step = config.train.tokens_per_step // config.data.seq_len
    skips = 0
    for step in range(state.step, config.run.steps):
        began = time.perf_counter()
        rows = corpus.rows_for(step, rows_per_step)
        microbatches = micro_rows(rows, world, config.train.device_batch_size)
        sums = boundary.accumulate([corpus.train_batch(rows) for rows in microbatches])
        grad_norm = float(clip_gradients(model, config.optim.clip_norm))
        multiplier = lr_multiplier(state.updates, config.run.steps, config.optim)
        healthy = torch.isfinite(torch.tensor(grad_norm)).item()
        if healthy:
            optimizers.step(multiplier)
        optimizers.zero_grad()
        boundary.update_routers()
        state.advance(updated=healthy)
        skips = 0 if healthy else skips + 1

        step_s = time.perf_counter() - began
        nll = sums.nll_sum.item()
        log.write(
            StepRecord(
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
                mfu=utilisation(sums.tokens / step_s),
            )
        )
        if skips > SKIPS_ALLOWED:
            raise NonFiniteError(
                f"optim.lr={config.optim.lr}: {skips} steps in a row had non-finite gradients. Fix: lower it."
            )
        last = step + 1 == config.run.steps
        if config.checkpoint.every and (step + 1) % config.checkpoint.every == 0 or last:
            state.save(config.checkpoint.keep)
        if config.run.eval_every and (step + 1) % config.run.eval_every == 0 and not last:
            log.evaluation(step, evaluate(boundary, corpus, config))

    # ---- the end: held-out loss next to gzip, final weights, a sample --------------------------
    log.evaluation(state.step, evaluate(boundary, corpus, config))
    finish(model, corpus, config, folder, world)
    log.close()
    world.close()


if __name__ == "__main__":
    assert RESOLVED is not None
    try:
        main(RESOLVED)
    except MegacppError as error:
        exit_on_error(error)
    except KeyboardInterrupt:
        sys.exit(130)
