"""Runs of the same model on any mesh, and how far they are apart.

Forked gloo ranks, a hybrid of every letter, ragged documents and label masks (some rows have no
label at all). In fp64 two orders of the same sums differ by about 1e-16 of their size, so 1e-12 is
a wrong formula; in fp32 it is 1e-5. Parameters after AdamW may differ by what its division makes of
the differences between gradients, element by element, and by nothing else: `adamw_bound`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.apply import ActivationCheckpointing
from megacpp.blocks.experts.module import Experts
from megacpp.blocks.experts.router import Router
from megacpp.config.schema import (
    KEEP,
    CheckpointingPolicy,
    Config,
    MeshConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.data.batches import Batch
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice
from megacpp.run.expert_load import ExpertLoad
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import shard_slice
from parallel.mesh import World
from parallel.start import join
from tests.awake import awake
from tests.collectives import Collective, CollectiveCounter
from tests.differences import largest, relative
from tests.parallel.parity_models import models
from tests.ranks import on_worlds
from tests.synthetic import micro_rows, ragged_batch

CPU = torch.device("cpu")
ROWS, T, STEPS = 8, 16, 3  # global rows of a step, tokens of a row, optimizer steps
Dtype = Literal["fp64", "fp32", "bf16"]
Slices = dict[str, Slice]  # what a rank holds of each parameter or gradient
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
HELD_OUT = range(1000, 1004)
BEHIND_ZEROS = ("ngram.tables.weight",)  # no gradient in the first step, as what reads them is 0


@dataclass(frozen=True)
class Run:
    """A run to compare: model, numeric type, mesh, microbatches of a step."""

    model: str
    mesh: MeshConfig = MeshConfig(dp_shard=1)  # noqa: RUF009 - frozen
    accum: int = 1
    dtype: Dtype = "fp64"
    optimizer: Literal["adamw", "muon_adamw"] = "adamw"
    evaluate: bool = False
    sync: Literal["defer", "each", "resident"] = "defer"
    recompute: CheckpointingPolicy = KEEP

    @property
    def world(self) -> int:
        m = self.mesh
        return m.pp * m.dp_replicate * m.dp_shard * m.cp * m.tp

    @property
    def device_batch(self) -> int:
        return ROWS // (self.mesh.dp_replicate * self.mesh.dp_shard * self.accum)

    @property
    def reference(self) -> Run:
        """The same on one process, with the same microbatches."""
        one = MeshConfig(dp_shard=1)
        return dataclasses.replace(self, mesh=one, sync="defer", recompute=KEEP)

    def __str__(self) -> str:
        axes = {k: v for k, v in vars(self.mesh).items() if v != getattr(MeshConfig(), k)}
        mesh = " ".join(f"{k}={v}" for k, v in axes.items() if (k, v) != ("dp_shard", 1))
        muon = " muon" if self.optimizer == "muon_adamw" else ""
        sync = "" if self.sync == "defer" else f" {self.sync}"
        policy = {k: v for k, v in vars(self.recompute).items() if v != getattr(KEEP, k)}
        again = "".join(f" {k}={v}" for k, v in policy.items())
        return f"{self.model} {self.dtype}{muon} {mesh or 'one'} x{self.accum}{sync}{again}"


@dataclass(frozen=True)
class AdamW:
    """Settings of AdamW for one parameter."""

    lr: float
    betas: tuple[float, float]
    eps: float


@dataclass
class Trace:
    """What a run was on one rank."""

    run: Run
    losses: list[float] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)  # losses and `ratio`
    start: Slices = field(default_factory=dict)  # parameters before the first step
    gradients: Slices = field(default_factory=dict)  # of the first step
    clipped: list[Slices] = field(default_factory=list)  # gradients that the optimizer took
    stepped: list[Slices] = field(default_factory=list)  # parameters after each step
    adamw: dict[str, AdamW] = field(default_factory=dict)  # settings, by the parameter's name
    parameters: Slices = field(default_factory=dict)  # after the last
    loads: list[tuple[ExpertLoad, ...]] = field(default_factory=list)  # of every E layer, each step
    counts: list[Tensor] = field(default_factory=list)  # of each router's experts, first step
    router_bias: dict[str, Tensor] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)  # of the last step
    scatters: dict[str, int] = field(default_factory=dict)  # of each unit of FSDP2, in that step
    replicated: int = 0  # of these units, those whose shards are added up over replicas, too
    sharded: bool = True
    again: dict[str, int] = field(default_factory=dict)  # regions that ran again, and how often


def config_of(run: Run) -> Config:
    # Losses of later steps are compared, too: with 1e-8 AdamW would magnify the rounding of tiny
    # gradients so far that they feel it, as logits of `res` have directions without gradient.
    eps = 1e-5 if run.model.startswith("everything") else 1e-8
    eps = 1e-4 if run.model == "everything_tiny" else eps  # twelve layers round more than seven
    return Config(
        model=models()[run.model],
        mesh=run.mesh,
        train=TrainConfig(gradient_sync=run.sync),
        precision=PrecisionConfig(run.dtype),
        recompute=run.recompute,
        # A momentum in bf16 goes up or down by its last bit where two runs differ in theirs.
        optim=OptimConfig(
            name=run.optimizer,
            eps=eps,
            lr=1e-2,
            clip_norm=1.0,
            muon_momentum_dtype="fp32" if run.dtype == "fp32" else "auto",
        ),
    )


def world_of(rank: int, run: Run) -> World:
    return World(0, 1, CPU) if run.world == 1 else join(run.mesh, CPU)


def batches_of(step: int, world: World, run: Run) -> list[Batch]:
    rows = range(step * ROWS, (step + 1) * ROWS)
    vocabulary = models()[run.model].vocab_size
    return [
        ragged_batch(share, T, vocabulary) for share in micro_rows(rows, world, run.device_batch)
    ]


def slices(tensors: dict[str, Tensor | None]) -> Slices:
    """Copies of what this rank holds."""
    found = {}
    for name, t in tensors.items():
        assert t is not None, f"{name} has no gradient"
        part = shard_slice(t.detach())
        assert part.local.isfinite().all(), f"{name} has values that aren't finite"
        found[name] = dataclasses.replace(part, local=part.local.clone())
    return found


def gradients(model: HybridLM) -> Slices:
    """Of what is trained; the rest has none."""
    assert all(p.requires_grad or p.grad is None for p in model.parameters())
    return slices({n: p.grad for n, p in model.named_parameters() if p.requires_grad})


def train(rank: int, run: Run) -> Trace:
    """Three optimizer steps as `train.py` makes them."""
    trace, world, config = Trace(run), world_of(rank, run), config_of(run)
    ac = ActivationCheckpointing(config)
    with awake():
        model = build_model(config, world, ac)
    boundary, optimizers = (
        AccumulationBoundary(model, world, config),
        build_optimizer(model, config, world.holders),
    )
    trace.start = slices(dict(model.named_parameters()))
    trace.adamw = {
        name: AdamW(float(group["lr"]), group["betas"], group["eps"])
        for group in optimizers.param_groups
        if group["algorithm"] == "adamw"
        for name in group["param_names"]
    }
    for step in range(STEPS):
        last = step == STEPS - 1
        if last:
            count_scatters(boundary, world, trace)
        with CollectiveCounter(world.meshes) if last else nullcontext() as seen:
            sums = boundary.accumulate(batches_of(step, world, run), step)
        if seen is not None:
            trace.collectives = seen.calls
        trace.losses.append(sums.loss_sum.item() / sums.valid_tokens)
        trace.valid.append(sums.valid_tokens)
        if step == 0:
            trace.gradients = gradients(model)
            routers = [m for m in model.modules() if isinstance(m, Router)]
            counts = [r.tokens_per_expert.clone() for r in routers]
            trace.counts = [world.sum(c, "stage") for c in counts]
        norm = clip_gradients(
            model, config.optim.clip_norm, copies=boundary.copies, along=sums.along
        )
        trace.clipped.append(gradients(model))
        status = boundary.check_step(sums, norm)
        assert status.healthy and not status.nonfinite
        trace.norms.append(status.grad_norm)
        trace.loads.append(status.loads)
        trace.auxiliary.append(status.auxiliary | {"ratio": status.auxiliary_ratio or 0.0})
        optimizers.step()
        trace.stepped.append(slices(dict(model.named_parameters())))
        optimizers.zero_grad()
        boundary.finish_step(status)
        if run.evaluate:
            size, rank_of = world.degree("batch"), world.coordinate("batch")
            rows = [row for row in HELD_OUT if row % size == rank_of]
            held_out = boundary.evaluate([ragged_batch([row], T, 48) for row in rows])
            trace.evaluations.append(held_out.loss_sum.item() / held_out.valid_tokens)
            kinds = {isinstance(p, DTensor) for p in model.parameters()}
            trace.sharded &= kinds == {run.world > 1}
    trace.parameters = trace.stepped[-1]
    trace.again = ac.replays.counts
    trace.router_bias = {n: b.clone() for n, b in model.named_buffers() if n.endswith("_bias")}
    return trace


def count_scatters(boundary: AccumulationBoundary, world: World, trace: Trace) -> None:
    """Notes how often each unit of FSDP2 gives its gradients away: the guard sees them all."""
    guard, clean = boundary.guard, boundary.guard.clean
    reduced = guard.names[: len(guard.names) - len(guard.loose)]
    experts = {name for name, m in boundary.model.named_modules() if isinstance(m, Experts)}

    def counted(number: int, values: Tensor) -> None:
        if number < len(reduced):
            name = reduced[number]
            if name not in trace.scatters:
                mesh = world.meshes["expert_shard" if name in experts else "shard"]
                trace.replicated += mesh.ndim - 1
            trace.scatters[name] = trace.scatters.get(name, 0) + 1
        clean(number, values)

    guard.clean = counted  # type: ignore[method-assign]


def check_scatters(trace: Trace) -> None:
    """Each unit gave its gradients away once in a step, or, if told to, after each microbatch.

    Replicas add up the shards of each unit once.
    """
    run = trace.run
    times = run.accum if run.sync == "each" else 1
    assert set(trace.scatters.values()) <= {times}, trace.scatters
    calls = [c for c in trace.collectives if c.axis == "dp_replicate" and c.kind == "all_reduce"]
    assert len(calls) == trace.replicated, (trace.scatters, calls)
    sharded = run.mesh.dp_replicate * run.mesh.dp_shard * run.mesh.cp > 1
    assert sharded <= bool(trace.scatters), "no unit"


def traces_of(runs: Sequence[Run]) -> dict[Run, list[Trace]]:
    """The traces of every rank of every run."""
    return on_worlds(train, {run: run.world for run in runs})


def box_of(part: Slice) -> tuple[slice, ...]:
    """Index of a part in the whole tensor."""
    return tuple(slice(a, a + n) for a, n in zip(part.offset, part.local.shape, strict=True))


def errors(found: Slices, expected: Slices) -> dict[str, float]:
    """Largest difference of each tensor that differs, relative to its largest entry."""
    found_apart = {}
    for key, part in found.items():
        whole = expected[key].local
        assert part.shape == tuple(whole.shape), key
        if apart := relative(part.local, whole[box_of(part)], whole):
            found_apart[key] = apart
    return found_apart


def error(found: Slices, expected: Slices) -> tuple[float, str]:
    """Largest of `errors`, and the tensor's name."""
    return max(((value, key) for key, value in errors(found, expected).items()), default=(0.0, ""))


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
    before = moved_by_rounding(found, expected)
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
        check_parameters(trace, expected, tolerance, before)
        for loads, others in zip(trace.loads, expected.loads, strict=True):
            for a, b in zip(loads, others, strict=True):  # of all stages, on every rank
                assert (a.layer, a.counts, a.nulls) == (b.layer, b.counts, b.nulls)
                assert abs((a.bias_range or 0.0) - (b.bias_range or 0.0)) <= 1e-15
        for key, bias in trace.router_bias.items():
            assert torch.equal(bias, expected.router_bias[key]), key


def summary(found: list[Trace], expected: Trace) -> dict[str, Any]:
    """The same figures without a status, for a person who looks for a cause."""
    return {
        "loss": largest(
            abs(a / b - 1) for t in found for a, b in zip(t.losses, expected.losses, strict=True)
        ),
        "norm": largest(
            abs(a / b - 1) for t in found for a, b in zip(t.norms, expected.norms, strict=True)
        ),
        "gradient": max(error(t.gradients, expected.gradients) for t in found),
        "parameter": max(error(t.parameters, expected.parameters) for t in found),
    }
