"""Assignment 1: gather and reduce-scatter on a ring."""

from typing import Any

from torch import Tensor


def gather(link: Any, shard: Tensor) -> Tensor:
    """Return the shards of all ranks, concatenated along dim 0."""
    raise NotImplementedError


def reduce_scatter(link: Any, full: Tensor) -> Tensor:
    """Return the sum over ranks of this rank's part of `full`, cut along dim 0."""
    raise NotImplementedError
