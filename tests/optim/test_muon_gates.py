"""Muon's traffic and FLOPs on a rank, against closed forms of other implementations.

Fake process groups. The same matrices, cut by rows over W ranks; bytes are those that leave a rank,
the mean over ranks. P is the bytes of all matrices in bf16. Forms of others, from their sources:

    microsoft/dion         each shape padded to a multiple of W matrices, rows to one of W, in bf16
    torchtitan DistMuon    each matrix to one owner and back, in the dtype of the weights, fp32
    torch.optim.Muon       collectives of DTensor inside of Newton-Schulz; counted here
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bench.muon_contenders import SETS, shapes_of, torch_muon
from bench.muon_log import StepLog
from megacpp.config.presets import PRESETS
from megacpp.lessons.muon import fake_group
from optim.groups import assign
from optim.muon_adamw import MuonAdamW
from optim.muon_plan import MuonPlan
from optim.newton_schulz import newton_schulz_flops
from optim.ownership import MatrixView
from tests.optim.test_groups import meta

Shape = tuple[int, ...]
ROWS_CUT = [name for name in SETS if name != "experts"]  # stacks lie whole on ranks: nothing moves


def planned(shapes: Sequence[Shape], ranks: int, copies: int = 1, views: Any = None) -> MuonPlan:
    """Return the plan of rank 0, for parameters without memory."""
    with fake_group(ranks * copies):
        mesh = init_device_mesh("cpu", (copies, ranks), mesh_dim_names=("replicate", "shard"))
        params = []
        for shape in shapes:
            whole = torch.empty(shape, device="meta")
            local = whole[: -(-shape[0] // ranks)]  # the first rank's is never the shorter one
            cut = DTensor.from_local(
                local,
                mesh,
                [Replicate(), Shard(0)],
                shape=whole.shape,
                stride=whole.stride(),
                run_check=False,
            )
            params.append(nn.Parameter(cut))
        group = {"params": params, "algorithm": "muon"} | ({"views": views} if views else {})
        return MuonAdamW([group], "bf16").plan()


def sent_bytes(plan: MuonPlan) -> float:
    """Return the mean bytes sent per rank: cells go to the owner and back, in bf16."""
    (exchange,) = plan.exchanges
    others = sum(
        job.region.size * (len(job.holders) - 1) / len(job.holders)  # rows divide
        for job in exchange.jobs
        if job.moves
    )
    return 2 * 2 * others / exchange.num_ranks


def dion_bytes(shapes: Sequence[Shape], ranks: int) -> int:
    found = 0
    for (rows, cols), count in Counter(shapes).items():
        turns, height = -(-count // ranks), -(-rows // ranks)
        found += 2 * turns * (ranks - 1) * height * cols * 2
    return found


def torchtitan_bytes(shapes: Sequence[Shape], ranks: int) -> float:
    return 2 * (ranks - 1) / ranks**2 * 4 * sum(rows * cols for rows, cols in shapes)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("name", ROWS_CUT)
def test_bytes_beside_others(name: str, ranks: int) -> None:
    shapes = shapes_of(SETS[name])
    ours = sent_bytes(planned(shapes, ranks))
    P = 2 * sum(rows * cols for rows, cols in shapes)
    assert ours == 2 * (ranks - 1) / ranks**2 * P
    assert ours <= dion_bytes(shapes, ranks)
    assert ours <= 0.5 * torchtitan_bytes(shapes, ranks)
    if name == "mixed" and ranks >= 4:
        assert ours < 0.9 * dion_bytes(shapes, ranks), "no padding"


@pytest.mark.parametrize("name", ROWS_CUT)
def test_the_closed_form_is_what_a_step_sends(name: str) -> None:
    """Counted below DTensor, on one rank of four; small parts of the sets."""
    shapes, ranks = [shape for _, shape in SETS[name] for _ in range(4)], 4
    sides = [(rows // 8, cols // 8) for rows, cols in shapes]
    found = 0.0
    for rank in range(ranks):
        with fake_group(ranks, rank):
            found += _step(sides, ours=True).sent / ranks
    assert found == sent_bytes(planned(sides, ranks))


@pytest.mark.parametrize("name", ["tiny", "mixed"])
def test_torch_sends_fifteen_times_as_much(name: str) -> None:
    shapes, ranks = [shape for _, shape in SETS[name] for _ in range(4)], 4
    with fake_group(ranks):
        theirs = _step(shapes, ours=False)
    assert theirs.count() >= 10 * len(shapes), "collectives inside of every Newton-Schulz"
    assert sent_bytes(planned(shapes, ranks)) < theirs.sent / 15


def _step(shapes: Sequence[Shape], ours: bool) -> StepLog:
    """Run one optimizer step on this rank of a fake group."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    g = torch.Generator().manual_seed(0)

    def cut(shape: Shape) -> Any:
        whole = torch.randn(shape, generator=g)
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

    params = [nn.Parameter(cut(shape)) for shape in shapes]
    for p in params:
        p.grad = cut(tuple(p.shape))
    if ours:
        step = MuonAdamW([{"params": params, "algorithm": "muon"}], "bf16").step
    else:
        step = torch_muon(params).step
    with StepLog() as log:
        step()
    return log


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", ROWS_CUT)
def test_the_busiest_rank_of_four(name: str, copies: int) -> None:
    """At most 5 % above an equal share, and every matrix once: replicas share, dion's would pad."""
    shapes = shapes_of(SETS[name])
    (exchange,) = planned(shapes, 4 // copies, copies).exchanges
    assert sum(exchange.loads) == sum(newton_schulz_flops(*shape) for shape in shapes)
    assert exchange.imbalance <= 1.05


@pytest.mark.parametrize("name", ["hybrid_400m", "moe_small", "dense_110m"])
def test_the_busiest_rank_of_eight_for_presets(name: str) -> None:
    model = meta(PRESETS[name]().model)
    muon = [a for a in assign(model, "muon_adamw") if a.algorithm == "muon"]
    plan = planned([tuple(a.parameter.shape) for a in muon], 8, views=[a.view for a in muon])
    assert any(view != MatrixView() for view in (a.view for a in muon)) or name == "dense_110m"
    assert all(exchange.imbalance <= 1.05 for exchange in plan.exchanges)
