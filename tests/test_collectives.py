"""Collective counter: every way to issue a collective, its size, and silence without one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.collectives import Collective, CollectiveCounter
from tests.ranks import run_ranks

F32, BF16 = torch.float32, torch.bfloat16


def issue(rank: int, world: int) -> list[list[Collective]]:
    """Issue the calls of each kind of program."""
    mesh, x = init_device_mesh("cpu", (world,)), torch.ones(6)
    matrix = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    leaf = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    leaf.requires_grad_()

    def in_place() -> None:
        dist.all_reduce(x.bfloat16())
        dist.all_gather([torch.empty(6) for _ in range(world)], x)
        dist.broadcast(x, 0)
        dist.all_to_all_single(torch.empty(6), x)

    def traced() -> None:
        functional.all_reduce(x, "sum", mesh).sum()

    def by_dtensor() -> None:
        doubled = matrix + matrix
        assert isinstance(doubled, DTensor)
        doubled.redistribute(placements=[Replicate()])

    def backward() -> None:
        leaf.redistribute(placements=[Replicate()]).to_local().sum().backward()

    def local() -> None:
        (x @ x).item()
        (matrix * 2).detach()

    recorded = []
    for program in (in_place, traced, by_dtensor, backward, local):
        with CollectiveCounter() as seen:
            program()
        recorded.append(seen.calls)
    return recorded


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 renames some of these
def test_every_way_is_counted_once() -> None:
    for in_place, traced, by_dtensor, backward, local in run_ranks(issue, 2):
        assert in_place == [
            Collective("all_reduce", BF16, 6),
            Collective("all_gather", F32, 12),
            Collective("broadcast", F32, 6),
            Collective("all_to_all", F32, 6),
        ]
        assert traced == [Collective("all_reduce", F32, 6)]
        assert by_dtensor == [Collective("all_gather", F32, 8)]
        assert backward == [Collective("all_gather", F32, 8)]
        assert local == []


def test_sums() -> None:
    seen = CollectiveCounter()
    seen.calls = [Collective("all_gather", F32, 3), Collective("all_gather", BF16, 5)]
    assert seen.count("all_gather") == 2 and seen.count("all_gather", BF16) == 1
    assert seen.bytes("all_gather") == 22 and seen.bytes("all_gather", BF16) == 10
    assert seen.count("all_reduce") == seen.bytes("all_reduce") == 0
