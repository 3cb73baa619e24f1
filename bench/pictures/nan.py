"""Picture of one NaN on four ranks: where it shows, and what becomes of the run."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from bench.pictures.boundary import RANKS, TOKENS, built
from bench.pictures.svg import Drawing
from megacpp.config.schema import Config, MeshConfig, TrainConfig
from megacpp.data.batches import Batch
from megacpp.errors import NonFiniteError
from megacpp.lessons.batches import micro_rows, ragged_batch
from megacpp.lessons.ranks import run_ranks
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.torch_extras import local_part
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.mesh import World
from parallel.start import join
from parallel.watched_units import REST

UNCHECKED, STEPS, BAD = "no check", 6, 2
FATES = {"taken": 3, "left out": 2, "taken with zeros": 6, "the run ends": 8, "weights NaN": 1}


def spoil(model: HybridLM, rank: int) -> None:
    """Let the gradient behind block 1 become NaN at one token of rank 1, in one microbatch."""

    def forward(module: Any, args: Any, out: Tensor) -> None:
        hook.remove()
        out.register_hook(lambda grad: grad.index_fill(1, torch.tensor([5]), torch.nan))

    if rank == 1:
        hook = model.blocks["1"].register_forward_hook(forward)


def rows_of_step(world: World, step: int) -> list[Batch]:
    """Return this rank's two microbatches of a step of sixteen rows."""
    rows = range(16 * step, 16 * step + 16)
    return [ragged_batch(share, TOKENS, 48) for share in micro_rows(rows, world, 2)]


def nan_by_unit(rank: int, size: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Count the non-finite values in a step with one NaN, by the guard's parts of the model.

    Returns:
        Before the sum on this rank; in its shards of the sum, with no guard; with the guard.
    """
    world = join(MeshConfig(dp_shard=size), torch.device("cpu"))
    before: dict[str, int] = {}
    after: list[dict[str, int]] = []
    for policy in ("off", "skip"):
        model, boundary = built(world, "FAE", TrainConfig(nonfinite=policy), "fp64")
        spoil(model, rank)
        boundary.accumulate(rows_of_step(world, 0))
        before = dict.fromkeys(boundary.guard.names, 0) | boundary.guard.found()
        shards: Counter[str] = Counter()
        root = {name for name, _ in contract_parameters(model)}
        for name, p in model.named_parameters():
            assert p.grad is not None
            unit = REST if name in root else name.split(".mixer")[0].removesuffix(".weight")
            shards[unit] += int((~local_part(p.grad).isfinite()).sum())
        after.append(dict(shards))
    return before, after[0], after[1]


def steps_by_policy(rank: int, size: int) -> dict[str, list[tuple[str, float]]]:
    """Train with one NaN in step `BAD` under each policy.

    Returns:
        What became of each step, a key of `FATES`, and its loss.
    """
    world = join(MeshConfig(dp_shard=size), torch.device("cpu"))
    found: dict[str, list[tuple[str, float]]] = {}
    for policy in ("skip", "sanitize", "raise", "off", UNCHECKED):
        value = "off" if policy == UNCHECKED else policy
        model, boundary = built(world, "FAE", TrainConfig(nonfinite=value), "fp64")
        optimizer = build_optimizer(model, Config(), world.holders)
        steps = found.setdefault(policy, [])
        for step in range(STEPS):
            if step == BAD:
                spoil(model, rank)
            sums = boundary.accumulate(rows_of_step(world, step))
            norm = clip_gradients(model.parameters(), 1.0, along=sums.along)
            try:
                seen = boundary.check_step(sums, norm)
            except NonFiniteError:
                steps.append(("the run ends", math.nan))
                break
            taken = seen.healthy or policy == UNCHECKED
            if taken:
                optimizer.step()
            optimizer.zero_grad()
            boundary.finish_step(seen)
            fate = "left out" if not taken else "taken with zeros" if seen.nonfinite else "taken"
            if not all(local_part(p).isfinite().all() for p in model.parameters()):
                fate = "weights NaN"
            steps.append((fate, seen.loss))
    return found


def one_nan() -> Drawing:
    """Draw where one NaN of rank 1 shows before and after the sum, and what becomes of the run."""
    counts = run_ranks(nan_by_unit, RANKS)
    drawing = Drawing(760, "Non-finite gradients of four ranks before and after the sum, and the"
                      " loss over six steps by what is done about them")  # fmt: skip
    left, top, cell, row = 104.0, 62.0, 46.0, 22.0
    units = sorted(counts[0][0], key=list(counts[0][1]).index)
    for number, unit in enumerate(units):
        drawing.text(14, top + number * row + 15, unit.split(",")[0], "head")
    for panel, title in enumerate(("before the sum", "summed, no guard", "summed, with the guard")):
        x = left + panel * 220
        drawing.text(x, 24, title, "head")
        for rank, found in enumerate(counts):
            drawing.text(x + rank * cell + 2, top - 10, f"rank {rank}", "note")
            for number, unit in enumerate(units):
                count = found[panel][unit]
                place = x + rank * cell, top + number * row
                drawing.rect(
                    *place, cell - 2, row - 2, 1 if count else "off", f"{count:,}" if count else ""
                )
    y = top + len(units) * row + 16
    drawing.text(left, y, "Number of gradient values that aren't finite.", "note")
    runs, y = run_ranks(steps_by_policy, RANKS)[0], y + 30
    drawing.legend(left, y, [(fill, fate) for fate, fill in FATES.items()])
    y += 44
    drawing.text(14, y - 10, "loss of", "note")
    for step in range(STEPS):
        drawing.text(left + step * 104 + 34, y - 10, f"step {step}", "note")
    for number, (policy, steps) in enumerate(runs.items()):
        drawing.text(14, y + number * 28 + 17, policy, "head")
        for step, (fate, loss) in enumerate(steps):
            words = "exit" if fate == "the run ends" else f"{loss:.4f}".replace("nan", "NaN")
            drawing.rect(left + step * 104, y + number * 28, 101, 25, FATES[fate], words)
    return drawing
