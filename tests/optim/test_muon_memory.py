"""Bytes of Muon and AdamW: what is kept, what a step sends, and what it needs for a while.

Measured on tensors (checkpointing/tracing/live_bytes.py) and on collectives, against closed forms.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.config.schema import Config
from megacpp.lessons.muon import Shapes, fake_group, optimizer_of
from megacpp.memory.forms.muon import (
    WaveBytes,
    muon_transient_bytes,
    newton_schulz_bytes,
    step_peak_bytes,
)
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from optim.build import build_optimizer
from optim.initial_state import Width
from optim.muon_adamw import MuonAdamW
from optim.newton_schulz import CPU_BATCH_BYTES, least_batch, newton_schulz, newton_schulz_flops
from tests.collectives import CollectiveCounter
from tests.optim.test_groups import SMALL
from tests.ranks import run_ranks

KIB = 1 << 10


class Done:
    """Collective that has ended."""

    def wait(self) -> None:
        pass


def no_exchange(output: Tensor, *args: Any, **kwargs: Any) -> Done:
    """Gloo's threads let go of buffers when they please, which has no place in a count."""
    output.zero_()
    return Done()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64, 96), (3, 96, 64), (1, 130, 70), (5, 12, 40), (2, 8, 8)])
def test_newton_schulz_needs_what_the_formula_says(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    with LiveBytes() as live:
        newton_schulz(x, dtype=dtype)
    count = max(shape[0], least_batch(min(shape[1:]), dtype.itemsize))
    assert live.peak == newton_schulz_bytes(count, *shape[1:], dtype.itemsize)


MIXED: Shapes = [(64, 192), (192, 64), (96, 96), (8, 24, 40), (130, 70)] * 3
SHARED = {
    "two ranks": ((2,), [Shard(0)], {}),
    "two ranks, waves": ((2,), [Shard(0)], {"bucket_bytes": 24 * KIB}),
    "two ranks, momenta in blocks": ((2,), [Shard(0)], {}),
    "fp32 momentum, no Nesterov": ((2,), [Shard(0)], {"momentum_width": "fp32"}),
    "rows and columns, waves": ((2, 2), [Shard(0), Shard(1)], {"bucket_bytes": 12 * KIB}),
    "replicas": ((2, 2), [Replicate(), Shard(0)], {}),
    "replicas, waves": ((2, 2), [Replicate(), Shard(0)], {"bucket_bytes": 12 * KIB}),
}


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize("case", SHARED)
def test_a_sharded_step_needs_what_the_closed_form_says(
    case: str, wire: Width, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "blocks" in case:
        monkeypatch.setattr("optim.muon_plan.BLOCK_CELLS", 10_000)
    axes, placements, settings = SHARED[case]

    def body(rank: int, world: int) -> tuple[int, int, int, int, int]:
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("a", "b")[: len(axes)])
        shapes = [s for s in MIXED if len(s) == 2] if len(axes) == 2 else MIXED
        optimizer = optimizer_of(shapes, mesh, placements, muon_width=wire, **settings)
        for group in optimizer.param_groups:
            group["nesterov"] = "no Nesterov" not in case
        dist.all_to_all_single = no_exchange
        with LiveBytes() as live:
            optimizer.step()
        buckets = sum(len(e.buckets) for e in optimizer.plan().exchanges)
        return live.peak, optimizer.transient_bytes(), live.now, buckets, len(shapes)

    for peak, closed, now, buckets, _ in run_ranks(body, math.prod(axes)):
        assert peak == closed
        assert now == 0
        assert buckets >= 4 if "waves" in case else buckets == 1


def test_the_bucket_bounds_the_transients() -> None:
    """Three waves are alive, coming in and going out; the model is many times as large."""
    shapes, bucket = [(128, 128)] * 64, 16 * KIB

    def body(rank: int, world: int) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (world,))
        optimizer = optimizer_of(shapes, mesh, [Shard(0)], muon_width="bf16", bucket_bytes=bucket)
        assert len(optimizer.plan().exchanges[0].buckets) == 64
        whole = optimizer_of(shapes, mesh, [Shard(0)], muon_width="bf16")
        return optimizer.transient_bytes(), whole.transient_bytes()

    for few, all_at_once in run_ranks(body, 2):
        work = newton_schulz_bytes(1, 128, 128, 2) + 2 * 128 * 128
        assert few <= 6 * bucket * 2 + work  # a matrix is two buckets, its owner gets it whole
        assert all_at_once >= 2 * 2 * 128 * 128 * 32
        assert few < all_at_once / 4


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize("bucket", [16 * KIB, 1 << 20])
def test_one_process_needs_what_the_closed_form_says(wire: Width, bucket: int) -> None:
    optimizer = optimizer_of(MIXED, None, muon_width=wire, bucket_bytes=bucket)
    with LiveBytes() as live:
        optimizer.step()
    assert live.peak == optimizer.transient_bytes() and live.now == 0


# Ranks that cut, replicas, rows and columns of a matrix, matrices of each rank.
COUNTED = [(8, 1, 64, 32, 8), (2, 4, 64, 32, 8), (4, 2, 64, 32, 6), (32, 2, 64, 8, 8)]
COUNTED += [(64, 1, 64, 8, 8), (1024, 1, 1024, 4, 1)]


@pytest.mark.parametrize("shards, copies, rows, cols, each", COUNTED)
def test_bytes_and_collectives_of_many_ranks(
    shards: int, copies: int, rows: int, cols: int, each: int
) -> None:
    """P bytes of matrices on S shards and R replicas: P / RS to the owners, P / S back.

    Of which a rank's own are 1 / S and 1 / RS. To repeat the work on every replica would send
    2 P (1 - 1 / S) / S, and do R times the work.
    """
    world = shards * copies
    count = each * world
    with fake_group(world, rank=world - 1):
        mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=("replicate", "shard"))
        here, cut = torch.zeros(rows // shards, cols), [Replicate(), Shard(0)]
        params = [nn.Parameter(DTensor.from_local(here, mesh, cut)) for _ in range(count)]
        optimizer = MuonAdamW(
            [{"params": params, "algorithm": "muon"}],
            "bf16",
            bucket_bytes=2 * rows * cols * count // shards // min(3, each),
        )
        exchange = optimizer.plan().exchanges[0]
        for p in params:
            p.grad = torch.zeros_like(p)
        with CollectiveCounter() as seen:
            optimizer.step()
        assert all(call.dtype == torch.bfloat16 for call in seen.calls)
        assert [call.kind for call in seen.calls] == ["all_to_all"] * (2 * len(exchange.buckets))
        assert len(exchange.buckets) == 1 if each == 1 else 3 <= len(exchange.buckets) <= 5
        own = other = 0
        for bucket in exchange.buckets:
            for pieces in (bucket.sent, bucket.arriving):
                there = pieces.splits
                own += 2 * there[-1]
                other += 2 * sum(there[:-1])
        total = 2 * rows * cols * count
        assert own + other == total // world + total // shards
        out, back = total // world, total // shards
        assert other == out * (shards - 1) // shards + back * (world - 1) // world
        assert sum(call.bytes for call in seen.calls) == sum(
            2 * max(a.cells, b.cells)
            for bucket in exchange.buckets
            for a, b in ((bucket.sent, bucket.received), (bucket.returned, bucket.arriving))
        )
        work = count * newton_schulz_flops(rows, cols)
        assert sum(exchange.loads) == work and max(exchange.loads) == work // world


def test_state_is_two_bytes_under_muon_and_eight_under_adamw() -> None:
    """Count the state's bytes per cell of a model with every letter, in fp32."""
    config = Config(model=SMALL)
    with torch.device("meta"):
        model = HybridLM(config.model)
    model.to_empty(device="cpu")
    initialise(model, model.init_rules(), seed=1)
    optimizer = build_optimizer(model, config)
    kept = {"muon": 0, "adamw": 0}
    cells, tensors = dict(kept), dict(kept)
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept[group["algorithm"]] += sum(t.nbytes for t in optimizer.state[p].values())
            cells[group["algorithm"]] += p.numel()
            tensors[group["algorithm"]] += 1
    assert kept["muon"] == 2 * cells["muon"]
    assert kept["adamw"] == 8 * cells["adamw"] + 4 * tensors["adamw"]
    assert min(cells.values()) > 1000


ESTIMATES = {
    "one rank": (1, MIXED * 4, 32),
    "one rank, waves": (1, [(512, 512)] * 20, 1),
    "two ranks": (2, [(64, 192), (192, 64), (96, 96)] * 9, 32),
    "two ranks, waves": (2, [(512, 512), (512, 1024)] * 8, 1),
    "four ranks, waves": (4, [(512, 512), (512, 1024)] * 16, 1),
}


@pytest.mark.parametrize("case", ESTIMATES)
def test_the_estimate_without_a_plan_is_enough_and_not_far_off(case: str) -> None:
    world, shapes, bucket_mib = ESTIMATES[case]
    sides = [(s[-2], s[-1]) for s in shapes for _ in range(s[0] if len(s) == 3 else 1)]

    def needed(rank: int, ranks: int) -> int:
        mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        bucket = bucket_mib << 20
        return optimizer_of(
            shapes, mesh, [Shard(0)], muon_width="bf16", bucket_bytes=bucket
        ).transient_bytes()

    found = [needed(0, 1)] if world == 1 else run_ranks(needed, world)
    estimate = muon_transient_bytes(sides, world, bucket_mib, batch_bytes=CPU_BATCH_BYTES)
    assert max(found) <= estimate <= 2.5 * max(found), (found, estimate)
    assert muon_transient_bytes([], world) == 0


def test_the_peak_of_a_step_by_hand() -> None:
    """Wave 1 is the largest: when wave 2 is sent it is whole, and wave 0 is on its way back."""
    buckets = [
        WaveBytes(10, 11, 12, 13, 1, 2),
        WaveBytes(20, 21, 22, 23, 3, 30),
        WaveBytes(5, 5, 5, 5),
    ]
    behind, ahead = 12 + 13, 5 + 5
    assert step_peak_bytes(buckets) == 21 + 22 + 30 + behind + ahead
    assert step_peak_bytes(buckets[:1]) == 12 + 13
    assert step_peak_bytes(buckets[:1], [WaveBytes(7, packing=9, solving=8)]) == 10 + 11 + 7 + 9
    assert step_peak_bytes([], [WaveBytes(7, packing=3, solving=8)]) == 15
    assert step_peak_bytes([]) == 0
