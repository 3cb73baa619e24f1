"""Tests that the residual stream of a bf16 run is bf16 on one process as on every mesh.

Forked gloo ranks. Streams of the same rows are compared number by number, behind every block: a
stream of another dtype differs almost everywhere.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megacpp.config.schema import MeshConfig
from megacpp.model.block import Block
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.stages import Stage
from tests.parallel.parity import (
    Run,
    Slices,
    batches_of,
    box_of,
    config_of,
    gradients,
    world_of,
)
from tests.ranks import on_worlds
from tests.together import Together

MODELS = ("plain", "options")
EXACT = (
    MeshConfig(dp_shard=2),
    MeshConfig(dp_shard=1, dp_replicate=2),
    MeshConfig(dp_shard=1, pp=2),
)
ROUNDED = (
    MeshConfig(dp_shard=2, ep=2),
    MeshConfig(dp_shard=1, tp=2),
    MeshConfig(dp_shard=1, cp=2),
)


def runs(meshes: tuple[MeshConfig, ...]) -> list[Run]:
    return [
        Run(model, mesh, accum=2 if mesh.pp > 1 else 1, dtype="bf16")
        for model in MODELS
        for mesh in meshes
    ]


@dataclass
class Seen:
    streams: dict[str, Tensor] = field(default_factory=dict)  # behind each block, by its name
    gradients: Slices = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    loss: float = 0.0


def passed(rank: int, run: Run) -> Seen:
    """Forward and backward of one microbatch."""
    found, world, config = Seen(), world_of(rank, run), config_of(run)
    model = build_model(config, world)

    def note(name: str) -> Callable[..., None]:
        def hook(module: object, args: object, out: Tensor) -> None:
            found.streams[name] = (out.to_local() if isinstance(out, DTensor) else out).detach()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, Block) or name == "embed":
            module.register_forward_hook(note(name))
    batches = batches_of(0, world, run)
    sums = AccumulationBoundary(model, world, config).accumulate(batches)
    found.gradients, found.rows = gradients(model), tuple(batches[-1].rows)
    found.loss = sums.loss_sum.item() / sums.valid_tokens
    return found


@functools.cache
def results() -> Together[Run, list[Seen]]:
    def make(every: list[Run]) -> dict[Run, list[Seen]]:
        return on_worlds(passed, {run: run.world for run in every})

    return Together(__name__, runs(EXACT + ROUNDED), make, lambda run: [run.reference])


@pytest.mark.parametrize("run", runs(EXACT), ids=str)
def test_streams_are_equal_bit_for_bit(run: Run) -> None:
    """Compare every number behind every block on meshes that split rows or layers: equal bits.

    A rank rounds its part of a gradient to bf16 before FSDP2 adds parts up in fp32, so each differs
    by half a unit in the last place of eight bits, 2^-9 of its norm, and embeddings by as much
    again: equal ids are added up in bf16.
    """
    (one,) = results()[run.reference]
    assert len(one.streams) == 6
    for seen in results()[run]:
        rows = [one.rows.index(row) for row in seen.rows]
        assert seen.streams and seen.loss == pytest.approx(one.loss, rel=1e-6)  # sums in fp32
        for name, x in seen.streams.items():
            assert x.dtype == torch.bfloat16 and torch.equal(x, one.streams[name][rows]), name
        for name, apart in far(seen.gradients, one.gradients).items():
            assert apart <= 2.0**-8, (name, apart)


@pytest.mark.parametrize("run", runs(ROUNDED), ids=str)
def test_streams_differ_by_rounded_operations(run: Run) -> None:
    """Bound the difference on meshes that add up parts of a product or exchange rows.

    A rounding moves a number by 2^-9 at most, by 2^-9.8 in the quadratic mean; 80 independent ones,
    as a gradient of these models passes, by 2^-6.6.
    """
    (one,) = results()[run.reference]
    for seen in results()[run]:
        assert {x.dtype for x in seen.streams.values()} == {torch.bfloat16}
        assert abs(seen.loss / one.loss - 1) <= 2.0**-12
        apart = far(seen.gradients, one.gradients)
        assert statistics.median(apart.values()) <= 2.0**-6, apart


LENT = Run("tied", MeshConfig(dp_shard=2, pp=2, pp_schedule="dualpipev"), accum=4, dtype="bf16")


def held(rank: int, run: Run) -> list[tuple[bool, bool]]:
    """Return whether a lent embedding has a bf16 and an fp32 gradient, at each of its forwards."""
    found: list[tuple[bool, bool]] = []
    world, config = world_of(rank, run), config_of(run)
    model = build_model(config, world)
    forward = Stage.forward

    def seen(stage: Stage, x: Tensor) -> Tensor:
        if (unit := stage.lender) is not None:
            units = [m for m in unit.modules() if isinstance(m, FSDPModule)]
            groups = [m._get_fsdp_state()._fsdp_param_group for m in units]
            every = [p for group in groups if group for p in group.fsdp_params]
            (embed,) = (p for p in every if p._module_info.module is unit.embed)
            gradient = getattr(getattr(embed, "_unsharded_param", None), "grad", None)
            found.append((gradient is not None, embed.unsharded_accumulated_grad is not None))
        return forward(stage, x)

    with mock.patch.object(Stage, "forward", seen):
        AccumulationBoundary(model, world, config).accumulate(batches_of(0, world, run))
    return found


def test_a_lent_embedding_adds_gradients_up_in_fp32() -> None:
    """The first stage lends it to the last: each backward of either ends with an fp32 sum."""
    first, second, *_ = on_worlds(held, {LENT: LENT.world})[LENT]
    assert len(first) == LENT.accum and first == second
    assert not any(narrow for narrow, _ in first) and any(wide for _, wide in first)


def far(found: Slices, expected: Slices) -> dict[str, float]:
    """Norm of the difference of each part, over the norm of the whole."""
    return {
        name: float((part.local - expected[name].local[box_of(part)]).norm() / whole.norm())
        for name, part in found.items()
        if (whole := expected[name].local).any()
    }
