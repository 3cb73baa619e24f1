"""Assignment 1: gather and reduce-scatter on a ring."""

from typing import Any

import torch
from torch import Tensor


def gather(link: Any, shard: Tensor) -> Tensor:
    """Return the shards of all ranks, concatenated along dim 0."""
    n, r = link.world, link.rank
    parts = {r: shard}
    for hop in range(1, n):
        link.send((r + 1) % n, parts[(r - hop + 1) % n])
        parts[(r - hop) % n] = link.receive((r - 1) % n)
    return torch.cat([parts[i] for i in range(n)])


def reduce_scatter(link: Any, full: Tensor) -> Tensor:
    """Return the sum over ranks of this rank's part of `full`, cut along dim 0."""
    n, r = link.world, link.rank
    parts = full.chunk(n)
    total = parts[(r - 1) % n]
    for hop in range(1, n):
        link.send((r + 1) % n, total)
        total = link.receive((r - 1) % n) + parts[(r - hop - 1) % n]
    return total if n > 1 else full
