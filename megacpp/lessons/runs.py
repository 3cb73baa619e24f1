"""Runs of the same model on any mesh, and how far they are apart.

Forked gloo ranks, a hybrid of every letter, ragged documents and label masks (some rows have no
label at all). In fp64 two orders of the same sums differ by about 1e-16 of their size, so 1e-12 is
a wrong formula; in fp32 it is 1e-5.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.apply import ActivationCheckpointing
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
from megacpp.lessons.awake import awake
from megacpp.lessons.batches import micro_rows, ragged_batch
from megacpp.lessons.differences import largest, relative
from megacpp.lessons.mesh_models import models
from megacpp.lessons.ranks import on_worlds
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice
from megacpp.run.expert_load import ExpertLoad
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import shard_slice
from parallel.mesh import World
from parallel.plans import spread_modules
from parallel.simulate.collective_log import POINT_TO_POINT, Collective, CollectiveLog
from parallel.start import join

CPU = torch.device("cpu")
ROWS, T, STEPS = 8, 16, 3  # global rows of a step, tokens of a row, optimizer steps
Dtype = Literal["fp64", "fp32", "bf16"]
Slices = dict[str, Slice]  # what a rank holds of each parameter or gradient
Places = dict[tuple[Any, ...], tuple[int, ...]]  # offsets by name, shape and placements
HELD_OUT = range(1000, 1004)


@dataclass(frozen=True)
class Run:
    """Run to compare: model, numeric type, mesh, microbatches of a step."""

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
        """Number of ranks."""
        m = self.mesh
        return m.pp * m.dp_replicate * m.dp_shard * m.cp * m.tp

    @property
    def device_batch(self) -> int:
        """Rows of a microbatch on a rank.

        Raises:
            ValueError: the rows can't be dealt evenly.
        """
        parts = self.mesh.dp_replicate * self.mesh.dp_shard * self.accum
        if ROWS % parts:
            shares = f"{parts // self.accum} data ranks x accum={self.accum}"
            raise ValueError(f"{ROWS} rows of a step can't be dealt evenly to {shares}")
        return ROWS // parts

    @property
    def reference(self) -> Run:
        """Return the run on one process, with the same microbatches."""
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
    """Figures and tensors of a run on one rank."""

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
    collectives: list[Collective] | None = None  # of the last step, if they were asked for
    scatters: dict[str, int] = field(default_factory=dict)  # of each unit of FSDP2, in that step
    replicated: int = 0  # of these units, those whose shards are added up over replicas, too
    sharded: bool = True
    again: dict[str, int] = field(default_factory=dict)  # regions that ran again, and how often


def config_of(run: Run) -> Config:
    """Return the configuration of a run."""
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
    """Return the mesh of a run on this rank."""
    return World(0, 1, CPU) if run.world == 1 else join(run.mesh, CPU)


def batches_of(step: int, world: World, run: Run) -> list[Batch]:
    """Return the microbatches of this rank in a step."""
    rows = range(step * ROWS, (step + 1) * ROWS)
    vocabulary = models()[run.model].vocab_size
    return [
        ragged_batch(share, T, vocabulary) for share in micro_rows(rows, world, run.device_batch)
    ]


@torch.no_grad()
def slices(tensors: Mapping[str, Tensor | None], places: Places | None = None) -> Slices:
    """Return copies of what this rank holds.

    Args:
        tensors: by name.
        places: where tensors of a name and layout begin; found once for all tensors of a run.
    """
    places, found = {} if places is None else places, {}
    for name, t in tensors.items():
        assert t is not None, f"{name} has no gradient"
        layout = (name, t.shape, t.placements if isinstance(t, DTensor) else None)
        if layout not in places:
            places[layout] = shard_slice(t).offset
        local = (t.to_local() if isinstance(t, DTensor) else t).clone()
        assert local.isfinite().all(), f"{name} has values that aren't finite"
        found[name] = Slice(local, tuple(t.shape), places[layout])
    return found


def gradients(model: HybridLM, places: Places | None = None) -> Slices:
    """Return the gradients of parameters that are trained; the others have none."""
    assert all(p.requires_grad or p.grad is None for p in model.parameters())
    return slices({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, places)


def train(rank: int, run: Run, collectives: bool = False) -> Trace:
    """Make three optimizer steps as `train.py` does.

    Args:
        rank: number of this process.
        run: model, mesh and settings.
        collectives: count those of the last step; runs with replicas always do.
    """
    places: Places = {}
    trace, world, config = Trace(run), world_of(rank, run), config_of(run)
    ac = ActivationCheckpointing(config)
    with awake():
        model = build_model(config, world, ac)
    boundary, optimizers = (
        AccumulationBoundary(model, world, config),
        build_optimizer(model, config, world.holders),
    )
    trace.start = slices(dict(model.named_parameters()), places)
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
        counts_calls = last and (collectives or run.mesh.dp_replicate > 1)
        with CollectiveLog(world.meshes) if counts_calls else nullcontext() as seen:
            sums = boundary.accumulate(batches_of(step, world, run), step)
        if seen is not None:
            trace.collectives = [c for c in seen.calls if c.kind not in POINT_TO_POINT]
        trace.losses.append(sums.loss_sum.item() / sums.valid_tokens)
        trace.valid.append(sums.valid_tokens)
        if step == 0:
            trace.gradients = gradients(model, places)
            routers = boundary.loads.routers.values()
            counts = [r.tokens_per_expert.clone() for r in routers]
            trace.counts = [world.sum(c, "stage") for c in counts]
        norm = clip_gradients(
            model.parameters(), config.optim.clip_norm, copies=boundary.copies, along=sums.along
        )
        trace.clipped.append(gradients(model, places))
        status = boundary.check_step(sums, norm)
        assert status.healthy and not status.nonfinite
        trace.norms.append(status.grad_norm)
        trace.loads.append(status.loads)
        trace.auxiliary.append(status.auxiliary | {"ratio": status.auxiliary_ratio or 0.0})
        optimizers.step()
        trace.stepped.append(slices(dict(model.named_parameters()), places))
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
    """Note how often each unit of FSDP2 gives its gradients away: the guard sees them all."""
    guard, clean = boundary.guard, boundary.guard.clean
    reduced = guard.names[: len(guard.names) - len(guard.loose)]
    blocks = boundary.model.blocks.values()
    spread = {module for block in blocks for module in spread_modules(block)}
    experts = {name for name, m in boundary.model.named_modules() if m in spread}

    def counted(number: int, values: Tensor) -> None:
        if number < len(reduced):
            name = reduced[number]
            if name not in trace.scatters:
                mesh = world.meshes["expert_shard" if name in experts else "shard"]
                trace.replicated += mesh.ndim - 1
            trace.scatters[name] = trace.scatters.get(name, 0) + 1
        clean(number, values)

    guard.clean = counted  # type: ignore[method-assign]


def traces_of(runs: Sequence[Run], collectives: bool = False) -> dict[Run, list[Trace]]:
    """Return the traces of every rank of every run.

    Args:
        runs: a run that occurs twice is made once.
        collectives: count those of each last step, for a tenth of the time more.
    """
    body = functools.partial(train, collectives=collectives)
    return on_worlds(body, {run: run.world for run in runs})


def box_of(part: Slice) -> tuple[slice, ...]:
    """Return the index of a part in the whole tensor."""
    return tuple(slice(a, a + n) for a, n in zip(part.offset, part.local.shape, strict=True))


def errors(found: Slices, expected: Slices) -> dict[str, float]:
    """Return the largest difference of each tensor that differs, relative to its largest entry."""
    found_apart = {}
    for key, part in found.items():
        whole = expected[key].local
        assert part.shape == tuple(whole.shape), key
        if apart := relative(part.local, whole[box_of(part)], whole):
            found_apart[key] = apart
    return found_apart


def error(found: Slices, expected: Slices) -> tuple[float, str]:
    """Return the largest of `errors`, and the tensor's name."""
    return max(((value, key) for key, value in errors(found, expected).items()), default=(0.0, ""))


def summary(found: list[Trace], expected: Trace) -> dict[str, Any]:
    """Return the largest differences of loss, norm, gradients and parameters."""
    losses = [pair for t in found for pair in zip(t.losses, expected.losses, strict=True)]
    norms = [pair for t in found for pair in zip(t.norms, expected.norms, strict=True)]
    return {
        "loss": largest(abs(a / b - 1) for a, b in losses),
        "norm": largest(abs(a / b - 1) for a, b in norms),
        "gradient": max(error(t.gradients, expected.gradients) for t in found),
        "parameter": max(error(t.parameters, expected.parameters) for t in found),
    }
