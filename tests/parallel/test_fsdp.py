"""The same run on any data mesh and any accumulation: loss, gradients, parameters, collectives.

Forked gloo ranks, a hybrid of every letter, ragged documents and label masks (some rows have no
label at all). In fp64 two orders of the same sums differ by about 1e-16 of their size, so 1e-12 is
a wrong formula; in fp32 it is 1e-5.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
import torch._dynamo  # FSDP2 imports it: once here instead of once in every forked rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from megacpp.config import Config, MeshConfig, PrecisionConfig
from megacpp.data.batches import IGNORED, Batch
from megacpp.model.hybrid import HybridLM
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.fsdp import fsdp_units
from parallel.mesh import World, build_mesh, micro_rows
from tests.collectives import Collective, CollectiveCounter
from tests.model.small import variants
from tests.ranks import run_ranks
from tests.synthetic import ragged_batch

CPU = torch.device("cpu")
ROWS, STEPS = 8, 5  # global rows of a step; optimizer steps
Dtype = Literal["fp64", "fp32"]


@dataclass(frozen=True)
class Split:
    """A way to cut a step's rows: a mesh, and rows per rank and microbatch."""

    mesh: MeshConfig
    world: int
    device_batch: int

    @property
    def accum(self) -> int:
        return ROWS // (self.world * self.device_batch)


ONE = MeshConfig(dp_shard=1)
SPLITS = {
    "1 process x 1": Split(ONE, 1, 8),
    "1 process x 4": Split(ONE, 1, 2),
    "1 process x 8": Split(ONE, 1, 1),
    "2 shards x 1": Split(MeshConfig(dp_shard=2), 2, 4),
    "2 shards x 4": Split(MeshConfig(dp_shard=2), 2, 1),
    "2 replicas x 2": Split(MeshConfig(dp_replicate=2, dp_shard=1), 2, 2),
    "2x2 x 1": Split(MeshConfig(dp_replicate=2, dp_shard=2), 4, 2),
    "2x2 x 2": Split(MeshConfig(dp_replicate=2, dp_shard=2), 4, 1),
}


@dataclass
class Trace:
    """What a run was: one entry a step, and the whole tensors at its ends."""

    losses: list[float] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last
    router_bias: dict[str, Tensor] = field(default_factory=dict)
    collectives: list[list[Collective]] = field(default_factory=list)  # of each step
    units: int = 0


def config_of(name: str, dtype: Dtype) -> Config:
    """A small model with auxiliary losses, larger weights than usual, one numeric type."""
    model = variants()[name]
    moe = dataclasses.replace(model.moe, sequence_loss=1e-2, z_loss=1e-2)
    model = dataclasses.replace(model, moe=moe, init_std=0.1, z_loss=1e-3)
    return Config(model=model, precision=PrecisionConfig(dtype))


def world_of(rank: int, world: int, mesh: MeshConfig) -> World:
    if world == 1:
        return World(0, 1, CPU)
    return World(rank, world, CPU, build_mesh(mesh, CPU))


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def batches_of(step: int, world: World, split: Split) -> list[Batch]:
    rows = range(step * ROWS, (step + 1) * ROWS)
    return [ragged_batch(share) for share in micro_rows(rows, world, split.device_batch)]


def gradients(model: HybridLM) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} has no gradient"
        found[name] = whole(p.grad)
    return found


def train(rank: int, size: int, config: Config, split: Split, evaluate: bool = False) -> Trace:
    """Five AdamW steps; `evaluate` looks at held-out rows in between."""
    world, trace = world_of(rank, size, split.mesh), Trace()
    model = build_model(config, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    boundary = AccumulationBoundary(model, world)
    trace.units = len(fsdp_units(model))
    for step in range(STEPS):
        with CollectiveCounter() as seen:
            sums = boundary.accumulate(batches_of(step, world, split))
        trace.collectives.append(seen.calls)
        trace.losses.append(sums.loss_sum.item() / sums.valid_tokens)
        trace.valid.append(sums.valid_tokens)
        if step == 0:
            trace.gradients = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        boundary.update_routers()
        if evaluate:
            held_out = boundary.evaluate([ragged_batch([1000 + rank])])
            trace.evaluations.append(held_out.loss_sum.item() / held_out.valid_tokens)
            sharded = [isinstance(p, DTensor) for p in model.parameters()]
            assert all(sharded) if size > 1 else not any(sharded)
    trace.parameters = {n: whole(p) for n, p in model.named_parameters()}
    trace.router_bias = {n: b.clone() for n, b in model.named_buffers() if n.endswith("_bias")}
    return trace


@functools.cache
def reference(name: str, dtype: Dtype) -> Trace:
    return train(0, 1, config_of(name, dtype), SPLITS["1 process x 1"])


def runs(name: str, dtype: Dtype, split: Split, evaluate: bool = False) -> list[Trace]:
    """The trace of every rank."""
    config = config_of(name, dtype)
    if split.world == 1:
        return [train(0, 1, config, split, evaluate)]
    return run_ranks(train, split.world, config, split, evaluate)


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("name", "dtype", "split"),
    [
        *(("plain", "fp64", s) for s in SPLITS if s != "1 process x 1"),
        *(("plain", "fp32", s) for s in ("1 process x 4", "2 shards x 4", "2x2 x 1")),
        *(
            ("tied", "fp64", s)
            for s in ("1 process x 4", "2 shards x 1", "2 shards x 4", "2x2 x 2")
        ),
        ("mamba_mimo_norm_conv", "fp64", "2 shards x 4"),
        ("mla_low_rank_queries_yarn", "fp64", "2 shards x 4"),
    ],
)
def test_any_split_is_the_same_run(name: str, dtype: Dtype, split: str) -> None:
    """Loss of 5 AdamW steps, gradients of the first, parameters after the last, router biases.

    AdamW divides by the root of the squared gradient, so it magnifies the rounding of small
    gradients; parameters get a hundredfold allowance for that.
    """
    tolerance = {"fp64": 1e-12, "fp32": 1e-5}[dtype]
    expected = reference(name, dtype)
    assert len(set(expected.valid)) > 1, "steps with different numbers of labels"
    for trace in runs(name, dtype, SPLITS[split]):
        assert trace.valid == expected.valid
        for found, loss in zip(trace.losses, expected.losses, strict=True):
            assert abs(found / loss - 1) <= tolerance
        for key, gradient in expected.gradients.items():
            assert error(trace.gradients[key], gradient) <= tolerance, key
        for key, parameter in expected.parameters.items():
            assert error(trace.parameters[key], parameter) <= 100 * tolerance, key
        for key, bias in expected.router_bias.items():
            assert bias.abs().max() > 0 and torch.equal(trace.router_bias[key], bias), key
    assert expected.losses[-1] < expected.losses[0]


def test_evaluating_in_between_changes_nothing() -> None:
    """Bit for bit on the same mesh; and every mesh evaluates to the same loss."""
    split = SPLITS["2 shards x 4"]
    plain, with_looks = (runs("tied", "fp64", split, look) for look in (False, True))
    for a, b in zip(plain, with_looks, strict=True):
        assert a.losses == b.losses and len(b.evaluations) == STEPS
        assert all(torch.equal(a.parameters[k], b.parameters[k]) for k in a.parameters)
    assert with_looks[0].evaluations == with_looks[1].evaluations


@pytest.mark.parametrize("split", ["2 shards x 1", "2 shards x 4", "2x2 x 1", "2x2 x 2"])
@pytest.mark.parametrize("name", ["plain", "tied"])
def test_collectives_of_a_step(name: str, split: str) -> None:
    """One reduce-scatter a unit (HSDP: and one all-reduce), however many microbatches.

    Blocks are gathered for each forward and each backward; what a backward starts with may still
    be there. The root's contract parameters are gathered once a step.
    """
    cut = SPLITS[split]
    traces = runs(name, "fp64", cut)
    expected = reference(name, "fp64").parameters
    for trace in traces:
        # root, 5 blocks, and embedding and head: two units, or one when they are tied
        assert trace.units == 6 + (1 if name == "tied" else 2)
        for calls in trace.collectives:
            by_kind = {k: [c for c in calls if c.kind == k] for k in {c.kind for c in calls}}
            assert len(by_kind["reduce_scatter"]) == trace.units
            numel = sum(c.numel for c in by_kind["reduce_scatter"])
            assert numel >= sum(p.numel() for p in expected.values()), "every gradient is reduced"
            assert len(by_kind["all_gather"]) <= 1 + 2 * (trace.units - 1) * cut.accum
            # token counts, loss sums
            small = [c for c in by_kind["all_reduce"] if c.numel <= 3]
            reduced = [c for c in by_kind["all_reduce"] if c.numel > 3]
            assert len(small) == 2
            assert len(reduced) == (trace.units if cut.mesh.dp_replicate > 1 else 0)
            assert by_kind.keys() == {"reduce_scatter", "all_gather", "all_reduce"}


# ---- nothing to learn from ----------------------------------------------------------------------


def without_labels(batch: Batch) -> Batch:
    labels_BT = torch.full_like(batch.labels_BT, IGNORED)
    return dataclasses.replace(batch, labels_BT=labels_BT, num_targets=0, target_bytes=0)


def silent_step(
    rank: int, size: int, config: Config, split: Split, silent: Sequence[int]
) -> tuple[float, int, dict[str, Tensor]]:
    """One step whose microbatches numbered `silent` have no label on any rank."""
    world = world_of(rank, size, split.mesh)
    model = build_model(config, world)
    batches = batches_of(0, world, split)
    batches = [without_labels(b) if i in silent else b for i, b in enumerate(batches)]
    sums = AccumulationBoundary(model, world).accumulate(batches)
    return sums.loss_sum.item(), sums.valid_tokens, gradients(model)


def without_auxiliary(name: str) -> Config:
    config = config_of(name, "fp64")
    moe = dataclasses.replace(config.model.moe, sequence_loss=0.0, z_loss=0.0)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))


@pytest.mark.parametrize("split", ["1 process x 4", "2 shards x 4"])
@pytest.mark.parametrize("name", ["plain", "tied"])
def test_a_step_without_labels_has_zero_gradients(name: str, split: str) -> None:
    cut, config = SPLITS[split], without_auxiliary(name)
    results = (
        [silent_step(0, 1, config, cut, range(4))]
        if cut.world == 1
        else run_ranks(silent_step, cut.world, config, cut, range(4))
    )
    for loss, valid, found in results:
        assert loss == 0 and valid == 0
        assert all((g == 0).all() for g in found.values())


@pytest.mark.parametrize("silent", [[0], [3], [0, 1, 2]])
def test_microbatches_without_labels_add_nothing(silent: list[int]) -> None:
    """The step is that of the other microbatches, on one process and on two."""
    config = without_auxiliary("plain")
    one, two = SPLITS["1 process x 4"], SPLITS["2 shards x 4"]
    loss, valid, expected = silent_step(0, 1, config, one, silent)
    world = world_of(0, 1, ONE)
    model = build_model(config, world)
    loud = [b for i, b in enumerate(batches_of(0, world, one)) if i not in silent]
    sums = AccumulationBoundary(model, world).accumulate(loud)
    assert (sums.loss_sum.item(), sums.valid_tokens) == (loss, valid) and valid > 0
    for key, gradient in gradients(model).items():
        assert error(expected[key], gradient) <= 1e-12, key
    for other_loss, other_valid, found in run_ranks(silent_step, 2, config, two, silent):
        assert other_valid == valid and abs(other_loss / loss - 1) <= 1e-12
        assert all(error(found[key], expected[key]) <= 1e-12 for key in expected)


# ---- the gradient itself ------------------------------------------------------------------------


def test_the_boundary_gives_the_gradient_of_the_mean() -> None:
    """By plain autograd on all rows at once: loss / valid + auxiliary / tokens."""
    config, world = config_of("plain", "fp64"), World(0, 1, CPU)
    model, twin = build_model(config, world), build_model(config, world)
    boundary = AccumulationBoundary(model, world)
    sums = boundary.accumulate(batches_of(0, world, SPLITS["1 process x 4"]))
    batch = ragged_batch(range(ROWS))
    for router in AccumulationBoundary(twin, world).routers:
        router.aux_scale.fill_(1 / batch.ids_BT.numel())
    out = twin(batch.ids_BT, batch.labels_BT, batch.docs)
    (out.loss_sum / out.valid_tokens).backward()
    assert sums.valid_tokens == batch.num_targets and sums.tokens == batch.ids_BT.numel()
    assert sums.target_bytes == batch.target_bytes
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert error(p.grad, q.grad) <= 1e-12, key


def test_rows_of_a_step_are_covered_once_by_any_split() -> None:
    for split in SPLITS.values():
        rows = range(3 * ROWS, 4 * ROWS)
        shares = [
            micro_rows(rows, World(rank, split.world, CPU), split.device_batch)
            for rank in range(split.world)
        ]
        assert all(len(share) == split.accum for share in shares)
        assert sorted(r for share in shares for micro in share for r in micro) == list(rows)
