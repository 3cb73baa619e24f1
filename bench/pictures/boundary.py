"""Pictures of a step on four ranks: its microbatches and collectives, and what one NaN does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from bench.pictures.charts import Axes
from bench.pictures.svg import Drawing
from megacpp.config.schema import Config, MeshConfig, PrecisionConfig, TrainConfig
from megacpp.data.batches import Batch
from megacpp.dtensor import local_part
from megacpp.errors import NonFiniteError
from megacpp.lessons.batches import micro_rows, ragged_batch
from megacpp.lessons.mesh_models import models
from megacpp.lessons.ranks import run_ranks
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.guard import REST
from parallel.mesh import World
from parallel.simulate.collective_log import CollectiveLog
from parallel.start import join

UNCHECKED, STEPS, BAD = "no check", 6, 2
FATES = {"taken": 3, "left out": 2, "taken with zeros": 6, "the run ends": 8, "weights NaN": 1}

Divisor = Literal["tokens", "microbatches"]
Dtype = Literal["bf16", "fp64"]

RANKS = 4
# Rows of four microbatches, those with many labels first; rows 3, 7, 11 and 15 have none.
ROWS = (0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 3, 14, 7, 11, 15)
TOKENS = 12
RULES: tuple[Divisor, ...] = ("tokens", "microbatches")
BATCHES = (0, 3, 7, 9)  # fills of microbatches
COLLECTIVES = {"all_gather": 4, "reduce_scatter": 1, "all_reduce": 2}


def built(
    world: World, letters: str, train: TrainConfig, dtype: Dtype = "bf16"
) -> tuple[HybridLM, AccumulationBoundary]:
    """Return a small model, sharded over all ranks, and its boundary.

    Args:
        world: of the rank.
        letters: kinds of its blocks.
        train: settings of the boundary.
        dtype: of the products.
    """
    model = replace(models()["plain"], pattern=letters, depth=len(letters))
    mesh = MeshConfig(dp_shard=RANKS)
    config = Config(model=model, mesh=mesh, train=train, precision=PrecisionConfig(dtype))
    hybrid = build_model(config, world)
    return hybrid, AccumulationBoundary(hybrid, world, config)


def step_of_a_rank(
    rank: int, size: int, rule: Divisor
) -> tuple[list[int], list[list[tuple[str, int]]], list[float]]:
    """Run a step of four microbatches with a rule for the divisor of the loss.

    Returns:
        Valid tokens of this rank's microbatches; kinds and bytes of collectives, in front of each
        microbatch and behind the last; how much a token of each microbatch weighs in the loss,
        where 1 is an even share.
    """
    world = join(MeshConfig(dp_shard=size), torch.device("cpu"))
    batches = [ragged_batch(rows, TOKENS, 48) for rows in micro_rows(ROWS, world, 1)]
    model, boundary = built(world, "F", TrainConfig(divisor=rule))
    begun: list[int] = []
    with CollectiveLog(world.meshes) as log:
        model.register_forward_pre_hook(lambda *_: begun.append(len(log.calls)))
        sums = boundary.accumulate(batches)
        clip_gradients(model, 1.0, along=sums.along)
    weights = [sums.valid_tokens / d for d in sums.totals.divisors(rule).tolist()]
    kinds = [call.kind for call in log.calls]
    cuts = pairwise([0, *begun[1:], kinds.index("reduce_scatter"), len(kinds)])
    parts = [groupby(log.calls[a:b], lambda call: call.kind) for a, b in cuts]
    sent = [[(kind, sum(call.bytes for call in calls)) for kind, calls in part] for part in parts]
    return [batch.num_targets for batch in batches], sent, weights


def one_step_of_ranks() -> Drawing:
    """Draw four microbatches on four ranks on the way to one step, and the weight of a token."""
    ranks = {rule: run_ranks(step_of_a_rank, RANKS, rule) for rule in RULES}
    valid, sent = [counts for counts, _, _ in ranks["tokens"]], ranks["tokens"][0][1]
    drawing = Drawing(760, "Four microbatches on each of four ranks become one step, and the"
                      " weight of a token by two divisors")  # fmt: skip
    drawing.legend(84, 12, [(fill, kind) for kind, fill in COLLECTIVES.items()])
    drawing.text(440, 22, "a tall bar: all ranks, with the bytes of one", "note")
    top, row, wide, gap = 74.0, 32.0, 56.0, 44.0
    bottom = top + RANKS * row
    drawing.text(14, top - 10, "microbatch", "note")
    x = 84.0
    for number, calls in enumerate(sent):
        for kind, size in calls:
            drawing.rect(x + gap / 2 - 8, top, 12, RANKS * row - 4, COLLECTIVES[kind])
            words = f"{size / 1024:.1f} KiB" if size > 1000 else f"{size} B"
            drawing.text(x + gap / 2 - 2 - 3 * len(words), bottom + 12, words, "note")
            x += gap
            after = {"reduce_scatter": f"1/{RANKS} of g", "all_reduce": "step"}.get(kind)
            if after and number == len(BATCHES):
                for rank in range(RANKS):
                    drawing.rect(
                        x - 4,
                        top + rank * row,
                        wide - 4,
                        row - 4,
                        6 if after == "step" else 5,
                        after,
                    )
                x += wide
        if number < len(BATCHES):
            drawing.text(x + wide / 2 - 8, top - 10, f"{number + 1}", "head")
            for rank in range(RANKS):
                y, count = top + rank * row, valid[rank][number]
                full = count / TOKENS * (wide - 4)
                drawing.rect(x - 4, y, wide - 4, row - 4, "off")
                drawing.rect(x - 4, y, full, row - 4, BATCHES[number], f"{count}" if count else "")
                if not count:
                    drawing.text(x, y + 18, "0", "note")
            x += wide
    for rank in range(RANKS):
        drawing.text(14, top + rank * row + 19, f"rank {rank}", "head")
    drawing.text(84, bottom + 32, f"In a cell: its labels that count, of {TOKENS}.", "note")
    counts = [sum(column) for column in zip(*valid, strict=True)]
    _weights(drawing, bottom + 92, counts, {rule: ranks[rule][0][2] for rule in RULES})
    return drawing


def _weights(
    drawing: Drawing, top: float, valid: Sequence[int], weights: Mapping[Divisor, Sequence[float]]
) -> None:
    """Draw the weight of each token of a step under each rule.

    Args:
        drawing: where.
        top: of the charts.
        valid: labels of each microbatch, on all ranks.
        weights: of a token of each microbatch, by rule.
    """
    most = math.ceil(max(map(max, weights.values())))
    for panel, (rule, of_rule) in enumerate(weights.items()):
        axes = Axes(drawing, 60 + panel * 364.0, top, 310.0, 120.0, (0, sum(valid)), (0, most))
        drawing.text(axes.left, top - 30, f"train.divisor={rule}", "head")
        names = "tokens with a label", "weight of a token, 1: an even share" if not panel else ""
        axes.frame(range(0, sum(valid) + 1, 20), range(most + 1), names)
        begin = 0
        for number, (count, weight) in enumerate(zip(valid, of_rule, strict=True)):
            (x, y), (right, bottom) = axes.at(begin, weight), axes.at(begin + count, 0)
            drawing.rect(x, y, right - x - 1, bottom - y, BATCHES[number])
            words = f"{weight:.2g}"
            drawing.text((x + right) / 2 - 3.3 * len(words), y - 4, words, "note")
            begin += count


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
            norm = clip_gradients(model, 1.0, along=sums.along)
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
