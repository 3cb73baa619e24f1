"""Local shapes of a parameter on every rank of a mesh, computed from its placements alone.

No rank is asked and nothing is built: a thousand ranks are a loop over coordinates. Shards are
those of `torch.chunk`: equal parts, then a shorter one, then empty ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

Shards = tuple[tuple[int, int], ...]


def shards_of(placements: Sequence[Placement]) -> Shards:
    """Return (mesh dim, tensor dim) of every shard, in the order in which they are made.

    Mesh dims go from left to right, except FSDP2's: they come before the model axes in the mesh,
    but shard last, which torch writes as a strided shard.
    """
    made = [(i, p) for i, p in enumerate(placements) if not p.is_replicate()]
    assert not any(p.is_partial() for _, p in made), f"no storage: {placements}"
    made.sort(key=lambda pair: isinstance(pair[1], _StridedShard))
    return tuple((i, p.dim) for i, p in made)  # type: ignore[attr-defined]


def local_shape(
    shape: Sequence[int], cuts: Shards, sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape that the rank at a coordinate stores.

    Args:
        shape: of the whole tensor.
        cuts: (mesh dim, tensor dim) of every shard, from `shards_of`.
        sizes: of the mesh.
        coordinate: of the rank.
    """
    local = list(shape)
    for axis, dim in cuts:
        part = -(-local[dim] // sizes[axis])
        local[dim] = max(0, min(part, local[dim] - coordinate[axis] * part))
    return tuple(local)


def own_shape(t: Tensor) -> tuple[int, ...]:
    """Return the shape that this rank stores of a tensor, by arithmetic.

    Args:
        t: any shape; plain or DTensor.
    """
    if not isinstance(t, DTensor):
        return tuple(t.shape)
    coordinate = t.device_mesh.get_coordinate()
    assert coordinate is not None
    return local_shape(t.shape, shards_of(t.placements), t.device_mesh.shape, coordinate)


@dataclass(frozen=True)
class ShardBytes:
    """Bytes of a model's parameters on every rank that holds some.

    Attributes:
        by_rank: bytes that each rank stores.
        once: sum over ranks, each element counted on the first rank that has it.
    """

    by_rank: dict[int, int]
    once: int


def shard_bytes(parameters: Iterable[Tensor], copies: Sequence[Tensor] = ()) -> ShardBytes:
    """Count the bytes of parameters at every coordinate of their meshes.

    Args:
        parameters: plain or DTensors.
        copies: parameters that ranks of another mesh have too, and count.
    """
    others = {id(p) for p in copies}
    by_rank: dict[int, int] = {}
    seen: dict[tuple[Any, ...], list[tuple[int, bool]]] = {}
    once = 0
    for p in parameters:
        if not isinstance(p, DTensor):
            by_rank[0] = by_rank.get(0, 0) + p.numel() * p.itemsize
            once += p.numel() * p.itemsize if id(p) not in others else 0
            continue
        key = tuple(p.shape), shards_of(p.placements), tuple(p.device_mesh.shape)
        if key not in seen:
            seen[key] = list(_numels(*key))
        for rank, (numel, first) in zip(_ranks(p.device_mesh), seen[key], strict=True):
            by_rank[rank] = by_rank.get(rank, 0) + numel * p.itemsize
            once += numel * p.itemsize if first and id(p) not in others else 0
    return ShardBytes(by_rank, once)


def _numels(
    shape: tuple[int, ...], cuts: Shards, sizes: tuple[int, ...]
) -> Iterator[tuple[int, bool]]:
    """Elements at every coordinate, the last mesh dim fastest, and whether it is the first copy.

    Copies lie along the mesh dims that don't cut; the one at their first coordinate counts.
    """
    cutting = {axis for axis, _ in cuts}
    copies = [axis for axis in range(len(sizes)) if axis not in cutting]
    for at in product(*map(range, sizes)):
        first = all(at[axis] == 0 for axis in copies)
        yield math.prod(local_shape(shape, cuts, sizes, at)), first


def _ranks(mesh: DeviceMesh) -> list[int]:
    """Ranks of a mesh, the last dim fastest."""
    return mesh.mesh.flatten().tolist()
