"""Checks of runs on meshes against the same run on one process (megacpp/lessons/runs.py).

In fp64 two orders of the same sums differ by about 1e-16 of their size, so 1e-12 is a wrong
formula; in fp32 it is 1e-5. Parameters after AdamW may differ by what its division makes of the
differences between gradients, element by element, and by nothing else: `adamw_bound`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacpp.lessons.mesh_models import models
from megacpp.lessons.runs import (
    CPU,
    HELD_OUT,
    ROWS,
    STEPS,
    AdamW,
    Dtype,
    Run,
    Slices,
    T,
    Trace,
    batches_of,
    box_of,
    config_of,
    count_scatters,
    error,
    errors,
    gradients,
    slices,
    summary,
    traces_of,
    train,
    world_of,
)

__all__ = [
    "CPU", "HELD_OUT", "ROWS", "STEPS", "AdamW", "Dtype", "Run", "Slices", "T", "Trace",
    "batches_of", "box_of", "config_of", "count_scatters", "error", "errors", "gradients",
    "models", "slices", "summary", "traces_of", "train", "world_of",
]  # fmt: skip
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
BEHIND_ZEROS = ("ngram.tables.weight",)  # no gradient in the first step, as what reads them is 0


def check_scatters(trace: Trace) -> None:
    """Each unit gave its gradients away once in a step, or, if told to, after each microbatch.

    Replicas add up the shards of each unit once.
    """
    run = trace.run
    times = run.accum if run.sync == "each" else 1
    assert set(trace.scatters.values()) <= {times}, trace.scatters
    if run.mesh.dp_replicate > 1:
        made = [c for c in trace.collectives or () if c.axis == "dp_replicate"]
        calls = [c for c in made if c.kind == "all_reduce"]
        assert len(calls) == trace.replicated, (trace.scatters, calls)
    else:
        assert not trace.replicated, trace.scatters
    sharded = run.mesh.dp_replicate * run.mesh.dp_shard * run.mesh.cp > 1
    assert sharded <= bool(trace.scatters), "no unit"


def adamw_bound(
    gradients: Sequence[Tensor], others: Sequence[Tensor], weight: Tensor, adamw: AdamW
) -> Tensor:
    """Largest difference of a parameter between two runs of AdamW, by element.

    The update is lr * u with u = m / (s + eps): m is a mean of the gradients so far, s the root of
    a mean of their squares. Gradients that differ by d move m by at most the mean dm of |d|, and s,
    which is a 2-norm, by at most the 2-norm ds of d (triangle inequality). So u moves by at most
    (dm + |u| ds) / (s - ds + eps): about |d| / |g|, and 1 / eps where the gradient is rounding.
    Weight decay only shrinks a difference. The kernel's own arithmetic rounds gradient, moments and
    update less than sixteen times by half a unit in the last place, and the weight as often.

    Args:
        gradients: of each step, as one run's optimizer took them.
        others: those of the other run.
        weight: of the first run, after the last step.
    """
    (beta1, beta2), ulp = adamw.betas, torch.finfo(weight.dtype).eps
    mean = square = mean_off = square_off = torch.zeros_like(weight)
    bound = 8 * ulp * (weight.abs() + len(gradients) * adamw.lr)
    for step, (g, other) in enumerate(zip(gradients, others, strict=True), start=1):
        off = (g - other).abs() + 8 * ulp * g.abs()
        mean, mean_off = (beta1 * a + (1 - beta1) * b for a, b in ((mean, g), (mean_off, off)))
        square = beta2 * square + (1 - beta2) * g * g
        square_off = beta2 * square_off + (1 - beta2) * off * off
        m, dm = (x / (1 - beta1**step) for x in (mean, mean_off))
        s, ds = ((x / (1 - beta2**step)).sqrt() for x in (square, square_off))
        u = m.abs() / (s + adamw.eps)
        bound = bound + adamw.lr * (dm + u * ds) / ((s - ds).clamp(min=0) + adamw.eps)
    return bound


def moved_by_rounding(found: list[Trace], expected: Trace) -> list[float]:
    """Relative differences of all parameters before each step, added up over the whole model."""
    sums = [0.0]
    for step, wanted in enumerate(expected.stepped[:-1]):
        of_ranks = [errors(trace.stepped[step], wanted) for trace in found]
        names = {name for of_rank in of_ranks for name in of_rank}
        sums.append(sum(max(of.get(name, 0.0) for of in of_ranks) for name in names))
    return sums


def check_parameters(
    trace: Trace, expected: Trace, tolerance: float, before: Sequence[float]
) -> None:
    """Gradients of all steps, parameters after the last: all within what the steps before allow.

    A gradient is a sum of products in which each weight is at most twice, on the way forward and
    backward: where weights differ already, it may differ by twice the sum of their differences.
    Newton-Schulz magnifies a difference at most 3.4445^5 = 485 times, in practice a few times; in
    fp32 a parameter that Muon moves gets a hundredfold allowance for that.

    Args:
        before: `moved_by_rounding`, over all ranks: weights of other stages change gradients too.
    """
    for gradient, target, moved in zip(trace.clipped, expected.clipped, before, strict=True):
        worst = error(gradient, target)
        assert worst[0] <= tolerance + 2 * moved, (worst, moved)
    by_muon = tolerance if tolerance < 1e-10 else 100 * tolerance
    for name, part in trace.parameters.items():
        box, target = box_of(part), expected.parameters[name].local
        limit = torch.full_like(part.local, by_muon * target.abs().max().item())
        if name not in expected.clipped[0]:
            limit = torch.zeros_like(limit)  # what isn't trained doesn't move
        elif name in expected.adamw:
            others = [step[name].local for step in trace.clipped]
            own = [step[name].local[box] for step in expected.clipped]
            limit = adamw_bound(own, others, target[box], expected.adamw[name])
        excess = ((part.local - target[box]).abs() - limit).amax() if limit.numel() else 0.0
        assert excess <= 0, (name, excess)


def covered(found: Sequence[Slices], expected: Slices) -> None:
    """Asserts that the parts of all ranks together are every element."""
    for key, whole in expected.items():
        seen = torch.zeros(whole.local.shape, dtype=torch.bool)
        for of_rank in found:
            if key in of_rank:
                part = of_rank[key]
                seen[box_of(part)] = True
        assert seen.all(), f"{key}: {int((~seen).sum())} elements are on no rank"


def check(found: list[Trace], expected: Trace, dtype: Dtype) -> None:
    """Weights at the start, loss and norm of every step, gradients, expert counts, parameters."""
    tolerance = TOLERANCE[dtype]
    assert len(set(expected.valid)) > 1, "steps with different numbers of labels"
    moved = {n: part.local.norm() > 0 for n, part in expected.gradients.items()}
    assert all(moves for name, moves in moved.items() if name not in BEHIND_ZEROS), moved
    for slices_of in ("start", "gradients", "parameters"):
        covered([getattr(trace, slices_of) for trace in found], getattr(expected, slices_of))
    for trace in found:
        check_scatters(trace)
        assert error(trace.start, expected.start)[0] == 0
        assert trace.valid == expected.valid
        assert abs(trace.losses[0] / expected.losses[0] - 1) <= tolerance, trace.losses
        worst = error(trace.gradients, expected.gradients)
        assert worst[0] <= tolerance, worst
        for losses, others in ((trace.losses, expected.losses), (trace.norms, expected.norms)):
            for a, b in zip(losses, others, strict=True):
                assert abs(a / b - 1) <= tolerance, (losses, others)
        for terms, others in zip(trace.auxiliary, expected.auxiliary, strict=True):
            for term, value in others.items():
                assert abs(terms[term] - value) <= tolerance * abs(value), (terms, others)
        for loads, others in zip(trace.loads, expected.loads, strict=True):
            for a, b in zip(loads, others, strict=True):  # of all stages, on every rank
                assert (a.layer, a.counts, a.nulls) == (b.layer, b.counts, b.nulls)
                assert abs((a.bias_range or 0.0) - (b.bias_range or 0.0)) <= 1e-15
        for key, bias in trace.router_bias.items():
            assert torch.equal(bias, expected.router_bias[key]), key
    before = moved_by_rounding(found, expected)
    for trace in found:
        check_parameters(trace, expected, tolerance, before)
