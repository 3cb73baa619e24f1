"""Assignment 4: Muon where each matrix has one owner."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def owners(costs: Sequence[int], world: int) -> list[int]:
    """Return the owner of each matrix, the costliest first to the least loaded rank."""
    load, found = [0] * world, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[i] = load.index(min(load))
        load[found[i]] += costs[i]
    return found


def update(
    link: Any,
    shards: Sequence[Tensor],
    owner: Sequence[int],
    orthogonalise: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Return this rank's rows of each orthogonalised matrix.

    Args:
        link: way to the other ranks.
        shards: this rank's rows of each matrix.
        owner: owner of each matrix.
        orthogonalise: function of a whole matrix.
    """
    result: list[Tensor] = list(shards)
    others = [r for r in range(link.world) if r != link.rank]
    for shard, rank in zip(shards, owner, strict=True):
        if rank != link.rank:
            link.send(rank, shard)
    for i, rank in enumerate(owner):
        if rank == link.rank:
            rows = {r: link.receive(r) for r in others} | {rank: shards[i]}
            sizes = [len(rows[r]) for r in range(link.world)]
            parts = orthogonalise(torch.cat([rows[r] for r in range(link.world)])).split(sizes)
            result[i] = parts[rank]
            for r in others:
                link.send(r, parts[r])
    for i, rank in enumerate(owner):
        if rank != link.rank:
            result[i] = link.receive(rank)
    return result
