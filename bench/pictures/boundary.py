"""Picture of a step on four ranks: its microbatches, its collectives, the weight of a token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Literal

import torch

from bench.pictures.charts import Axes
from bench.pictures.svg import Drawing
from megacpp.config.schema import Config, MeshConfig, PrecisionConfig, TrainConfig
from megacpp.lessons.batches import micro_rows, ragged_batch
from megacpp.lessons.mesh_models import models
from megacpp.lessons.ranks import run_ranks
from megacpp.model.hybrid import HybridLM
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import World
from parallel.simulate.collective_log import CollectiveLog
from parallel.start import join

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
        clip_gradients(model.parameters(), 1.0, along=sums.along)
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
