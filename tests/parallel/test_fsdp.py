"""The same run on any data mesh and any accumulation: loss, gradients, parameters, collectives.

Forked gloo ranks, a hybrid of every letter, ragged documents and label masks (some rows have no
label at all). In fp64 two orders of the same sums differ by about 1e-16 of their size, so 1e-12 is
a wrong formula; in fp32 it is 1e-5.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from megacpp.config import Config, MeshConfig, PrecisionConfig
from megacpp.data.batches import IGNORED, Batch
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import Slice
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import shard_slice
from parallel.mesh import World, build_mesh, micro_rows
from tests.collectives import Collective, CollectiveCounter
from tests.model.small import variants
from tests.ranks import run_ranks
from tests.synthetic import ragged_batch

CPU = torch.device("cpu")
ROWS, T, STEPS = 8, 8, 5  # global rows of a step, tokens of a row, optimizer steps
Dtype = Literal["fp64", "fp32"]
Slices = dict[str, Slice]  # what a rank holds of each parameter or gradient


@dataclass(frozen=True)
class Split:
    """A way to cut a step's rows: a mesh, and rows per rank and microbatch."""

    mesh: MeshConfig
    world: int
    device_batch: int

    @property
    def accum(self) -> int:
        return ROWS // (self.world * self.device_batch)


HSDP = MeshConfig(dp_replicate=2, dp_shard=2)
SPLITS = {
    "1 process x 1": Split(MeshConfig(), 1, 8),
    "1 process x 4": Split(MeshConfig(), 1, 2),
    "2 shards x 1": Split(MeshConfig(dp_shard=2), 2, 4),
    "2 shards x 4": Split(MeshConfig(dp_shard=2), 2, 1),
    "2x2 x 1": Split(HSDP, 4, 2),
    "2x2 x 2": Split(HSDP, 4, 1),
}
HELD_OUT = range(1000, 1004)
SILENT = ((0, 2, 3), (0, 1, 2, 3))  # of four microbatches, those without a label


@dataclass(frozen=True)
class Case:
    """A run to compare: model variant, numeric type, split, and whether it evaluates in between."""

    name: str
    dtype: Dtype
    split: str
    evaluate: bool = False


CASES = [
    Case("plain", "fp64", "1 process x 4"),
    Case("plain", "fp64", "2 shards x 1"),
    Case("plain", "fp64", "2 shards x 4"),
    Case("plain", "fp32", "2 shards x 1"),
    Case("tied", "fp64", "2 shards x 1", evaluate=True),
    Case("tied", "fp64", "2 shards x 4"),
    Case("mamba_mimo_norm_conv", "fp64", "2 shards x 1"),
    Case("plain", "fp64", "2x2 x 2"),
    Case("tied", "fp64", "2x2 x 1"),
]


@dataclass
class Trace:
    """What a run was on one rank."""

    losses: list[float] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    gradients: Slices = field(default_factory=dict)  # of the first step
    parameters: Slices = field(default_factory=dict)  # after the last
    router_bias: dict[str, Tensor] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)  # of the last step


def config_of(name: str, dtype: Dtype, auxiliary: float = 1e-2) -> Config:
    """A small model with larger weights than usual and auxiliary losses."""
    model = variants()[name]
    moe = dataclasses.replace(model.moe, sequence_loss=auxiliary, z_loss=auxiliary)
    model = dataclasses.replace(model, moe=moe, init_std=0.1, z_loss=1e-3)
    return Config(model=model, precision=PrecisionConfig(dtype))


def world_of(rank: int, split: Split) -> World:
    if split.world == 1:
        return World(0, 1, CPU)
    return World(rank, split.world, CPU, build_mesh(split.mesh, CPU))


def batches_of(step: int, world: World, split: Split) -> list[Batch]:
    rows = range(step * ROWS, (step + 1) * ROWS)
    return [ragged_batch(share, T) for share in micro_rows(rows, world, split.device_batch)]


def slices(tensors: dict[str, Tensor | None]) -> Slices:
    """Copies of what this rank holds."""
    found = {}
    for name, t in tensors.items():
        assert t is not None, f"{name} has no gradient"
        part = shard_slice(t.detach())
        found[name] = dataclasses.replace(part, local=part.local.clone())
    return found


def gradients(model: HybridLM) -> Slices:
    return slices({n: p.grad for n, p in model.named_parameters()})


def train(rank: int, case: Case) -> Trace:
    """Five steps of AdamW on the local shards (element by element, so shards are enough)."""
    split, trace = SPLITS[case.split], Trace()
    world = world_of(rank, split)
    model = build_model(config_of(case.name, case.dtype), world)
    boundary = AccumulationBoundary(model, world)
    parameters, optimizer = list(model.parameters()), None
    for step in range(STEPS):
        with CollectiveCounter() if step == STEPS - 1 else nullcontext() as seen:
            sums = boundary.accumulate(batches_of(step, world, split))
        if seen is not None:
            trace.collectives = seen.calls
        trace.losses.append(sums.loss_sum.item() / sums.valid_tokens)
        trace.valid.append(sums.valid_tokens)
        if step == 0:
            trace.gradients = gradients(model)
        shards = [local(p) for p in parameters]
        if optimizer is None:
            optimizer = torch.optim.AdamW(shards, lr=1e-2, weight_decay=0.1)
        for known, shard, p in zip(
            optimizer.param_groups[0]["params"], shards, parameters, strict=True
        ):
            assert p.grad is not None and known.data_ptr() == shard.data_ptr()
            known.grad = local(p.grad)
        optimizer.step()
        model.zero_grad()
        boundary.update_routers()
        if case.evaluate:
            rows = [row for row in HELD_OUT if row % split.world == rank]
            held_out = boundary.evaluate([ragged_batch([row], T) for row in rows])
            trace.evaluations.append(held_out.loss_sum.item() / held_out.valid_tokens)
            sharded = {isinstance(p, DTensor) for p in model.parameters()}
            assert sharded == {split.world > 1}, "evaluating leaves gathered parameters behind"
    trace.parameters = slices(dict(model.named_parameters()))
    trace.router_bias = {n: b.clone() for n, b in model.named_buffers() if n.endswith("_bias")}
    return trace


def local(t: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def silent_step(rank: int, name: str, split: Split, silent: tuple[int, ...]) -> Any:
    """Loss, labels and gradients of a step with label-free microbatches and no auxiliary loss."""
    world = world_of(rank, split)
    model = build_model(config_of(name, "fp64", auxiliary=0.0), world)
    batches = batches_of(0, world, split)
    batches = [without_labels(b) if i in silent else b for i, b in enumerate(batches)]
    sums = AccumulationBoundary(model, world).accumulate(batches)
    return sums.loss_sum.item(), sums.valid_tokens, gradients(model)


def without_labels(batch: Batch) -> Batch:
    labels_BT = torch.full_like(batch.labels_BT, IGNORED)
    return dataclasses.replace(batch, labels_BT=labels_BT, num_targets=0, target_bytes=0)


# ---- one fork of ranks for all runs on as many ranks --------------------------------------------


@functools.cache
def results(world: int) -> list[dict[Any, Any]]:
    """Everything that runs on `world` ranks: per rank, by case."""
    jobs: dict[Any, Callable[[int], Any]] = {
        case: functools.partial(train, case=case)
        for case in CASES
        if SPLITS[case.split].world == world
    }
    if world == 1:
        jobs |= {one(case): functools.partial(train, case=one(case)) for case in CASES}
    if world < 4:
        split = SPLITS["1 process x 4" if world == 1 else "2 shards x 4"]
        for key in (*(("plain", silent) for silent in SILENT), ("tied", SILENT[-1])):
            jobs[key] = functools.partial(silent_step, name=key[0], split=split, silent=key[1])

    def body(rank: int, _world: int) -> dict[Any, Any]:
        return {key: job(rank) for key, job in jobs.items()}

    return [body(0, 1)] if world == 1 else run_ranks(body, world)


def one(case: Case) -> Case:
    """The same model on one process with all rows at once; the tied one evaluates."""
    return Case(case.name, case.dtype, "1 process x 1", evaluate=case.name == "tied")


def traces(case: Case) -> list[Trace]:
    """The trace of every rank."""
    return [of_rank[case] for of_rank in results(SPLITS[case.split].world)]


def reference(case: Case) -> Trace:
    return traces(one(case))[0]


def error(found: Slices, expected: Slices) -> float:
    """Largest difference of a tensor, relative to its largest entry."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for key, part in found.items():
        target, size = expected[key].local, expected[key].local.abs().max().item()
        assert part.shape == tuple(target.shape), key
        box = tuple(slice(a, a + n) for a, n in zip(part.offset, part.local.shape, strict=True))
        if part.local.numel() and not torch.equal(part.local, target[box]):
            difference = (part.local - target[box]).abs().max().item()
            worst = max(worst, difference / size if size else torch.inf)
    return worst


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name}-{c.dtype}-{c.split}")
def test_any_split_is_the_same_run(case: Case) -> None:
    """Loss of 5 AdamW steps, gradients of the first, parameters after the last, router biases.

    AdamW divides by the root of the squared gradient, so it magnifies the rounding of small
    gradients; parameters get a hundredfold allowance for that.
    """
    tolerance = {"fp64": 1e-12, "fp32": 1e-5}[case.dtype]
    expected = reference(case)
    assert len(set(expected.valid)) > 1, "steps with different numbers of labels"
    assert all(part.local.norm() > 0 for part in expected.gradients.values())
    for trace in traces(case):
        assert trace.valid == expected.valid
        for found, loss in zip(trace.losses, expected.losses, strict=True):
            assert abs(found / loss - 1) <= tolerance
        assert error(trace.gradients, expected.gradients) <= tolerance
        assert error(trace.parameters, expected.parameters) <= 100 * tolerance
        for key, bias in expected.router_bias.items():
            assert bias.abs().max() > 0 and torch.equal(trace.router_bias[key], bias), key


def test_evaluating_in_between_changes_nothing() -> None:
    """A run that looks at held-out rows is one that doesn't; every mesh sees the same loss."""
    looking = next(case for case in CASES if case.evaluate)
    plain = next(case for case in CASES if case.name == "tied" and not case.evaluate)
    expected = reference(looking).evaluations
    assert len(set(expected)) == STEPS
    for trace in traces(looking):
        assert trace.evaluations == pytest.approx(expected, rel=1e-12)
        assert trace.losses == pytest.approx(traces(plain)[0].losses, rel=1e-12)


@pytest.mark.parametrize(
    "case", [c for c in CASES if SPLITS[c.split].world > 1], ids=lambda c: f"{c.name}-{c.split}"
)
def test_collectives_of_a_step(case: Case) -> None:
    """One reduce-scatter a unit (HSDP: and one all-reduce), however many microbatches.

    Blocks are gathered for each forward and each backward; what a backward starts with may still
    be there. The root's contract parameters are gathered once a step.
    """
    split = SPLITS[case.split]
    numel = sum(part.local.numel() for part in reference(case).parameters.values())
    # root, 5 blocks, and embedding and head: two units, or one when they are tied
    units = 6 + (1 if case.name == "tied" else 2)
    for calls in (trace.collectives for trace in traces(case)):
        kinds = {call.kind for call in calls}
        assert kinds == {"reduce_scatter", "all_gather", "all_reduce"}
        scatters = [c.numel for c in calls if c.kind == "reduce_scatter"]
        assert len(scatters) == units and sum(scatters) >= numel, "every gradient, once"
        gathers = [c.numel for c in calls if c.kind == "all_gather"]
        assert units <= len(gathers) <= 1 + 2 * (units - 1) * split.accum
        sums = [c.numel for c in calls if c.kind == "all_reduce" and c.numel <= 3]
        reduced = [c.numel for c in calls if c.kind == "all_reduce" and c.numel > 3]
        assert len(sums) == 2, "numbers of tokens before, loss sums after"
        assert len(reduced) == (units if split.mesh.dp_replicate > 1 < split.mesh.dp_shard else 0)


# ---- nothing to learn from ----------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["plain", "tied"])
def test_a_step_without_labels_has_zero_gradients(name: str, world: int) -> None:
    for of_rank in results(world):
        loss, valid, found = of_rank[name, SILENT[-1]]
        assert loss == 0 and valid == 0
        assert all((part.local == 0).all() for part in found.values())


@pytest.mark.parametrize("silent", SILENT[:-1])
def test_microbatches_without_labels_add_nothing(silent: tuple[int, ...]) -> None:
    """The step is that of the other microbatches alone, on one process and on two."""
    world, split = World(0, 1, CPU), SPLITS["1 process x 4"]
    model = build_model(config_of("plain", "fp64", auxiliary=0.0), world)
    loud = [b for i, b in enumerate(batches_of(0, world, split)) if i not in silent]
    sums = AccumulationBoundary(model, world).accumulate(loud)
    for ranks in (1, 2):
        for of_rank in results(ranks):
            loss, valid, found = of_rank["plain", silent]
            assert valid == sums.valid_tokens > 0
            assert abs(loss / sums.loss_sum.item() - 1) <= 1e-12
            assert error(found, gradients(model)) <= 1e-12


# ---- the gradient itself ------------------------------------------------------------------------


def test_the_boundary_gives_the_gradient_of_the_mean() -> None:
    """By plain autograd on all rows at once: loss / valid + auxiliary / tokens."""
    config, world = config_of("plain", "fp64"), World(0, 1, CPU)
    model, twin = build_model(config, world), build_model(config, world)
    boundary = AccumulationBoundary(model, world)
    sums = boundary.accumulate(batches_of(0, world, SPLITS["1 process x 4"]))
    batch = ragged_batch(range(ROWS), T)
    for router in AccumulationBoundary(twin, world).routers:
        router.aux_scale.fill_(1 / batch.ids_BT.numel())
    out = twin(batch.ids_BT, batch.labels_BT, batch.docs)
    (out.loss_sum / out.valid_tokens).backward()
    assert sums.valid_tokens == batch.num_targets and sums.tokens == batch.ids_BT.numel()
    assert sums.target_bytes == batch.target_bytes
    assert error(gradients(model), gradients(twin)) <= 1e-12


def test_rows_of_a_step_are_covered_once_by_any_split() -> None:
    for split in SPLITS.values():
        rows = range(3 * ROWS, 4 * ROWS)
        shares = [
            micro_rows(rows, World(rank, split.world, CPU), split.device_batch)
            for rank in range(split.world)
        ]
        assert all(len(share) == split.accum for share in shares)
        assert sorted(r for share in shares for micro in share for r in micro) == list(rows)
