"""Which box of a sharded matrix, or of a stack of them, every rank holds.

Placements on a mesh cut a parameter into boxes: tensor parallelism cuts rows or columns, expert
parallelism sets experts apart, and FSDP2 cuts rows, or experts, of what these left. Everything
here is derived from shapes and placements: all ranks know all boxes without asking each other.

Legend: E matrices of a stack (1 for a single one), R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor

from megacpp.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


class ShardRegion(NamedTuple):
    """Cells `[low, high)` of a parameter `[E, R, C]`."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: ShardRegion) -> ShardRegion | None:
        """The cells of both; None if there are none."""
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return (
            ShardRegion(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None
        )

    def slices_in(self, outer: ShardRegion) -> tuple[slice, ...]:
        """Where these cells are in a tensor that holds the cells of `outer`."""
        edges = zip(self.low, self.high, outer.low, strict=True)
        return tuple(slice(a - first, b - first) for a, b, first in edges)


@dataclass(frozen=True)
class ShardLayout:
    """Where the cells of one parameter live among ranks that hold it once, or several times.

    Attributes:
        boxes: per rank of `group`.
        rank: this process in `group`.
        group: None: all cells are here.
        ranks: of `group`, in the process group of all; empty without one.
        replicas: per rank of `group`, which copy of the parameter its box is a part of; empty: all
            are parts of one.
    """

    regions: tuple[ShardRegion, ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()

    def replica(self, rank: int) -> int:
        return self.replicas[rank] if self.replicas else 0

    @property
    def num_replicas(self) -> int:
        return max(self.replicas, default=0) + 1


def stack_view(t: Tensor) -> Tensor:
    """A matrix `[R, C]` or a stack of them as `[E, R, C]`, sharing memory."""
    assert t.dim() in (2, 3), f"a matrix or a stack of them, not {tuple(t.shape)}"
    return t if t.dim() == 3 else t[None]


def layout_of(parameter: Tensor, process_groups: Sequence[dist.ProcessGroup] = ()) -> ShardLayout:
    """The boxes of a plain tensor, or of a DTensor on any mesh.

    The group is that of the mesh axes that cut and, if any does, of those along which replicas hold
    the same: together they do the work once.

    Args:
        process_groups: of several mesh axes, to choose from where several cut; all ranks always is
            one. None is made here: NCCL would need ranks that don't hold the parameter to help.
    """
    if not is_dtensor(parameter):
        return ShardLayout(
            (_stack_region(parameter.shape, [0] * parameter.dim(), parameter.shape),)
        )
    mesh = parameter.device_mesh
    order = cutting_order(parameter.placements, mesh.shape)
    cuts = {axis for axis, _ in order}
    copies = [a for a, n in enumerate(mesh.shape) if cuts and n > 1 and a not in cuts]
    axes = sorted([*cuts, *copies])
    ranks, own = _ranks_along(mesh, axes), mesh.get_coordinate()
    assert own is not None, f"this rank is not in {mesh}"
    regions = {
        rank: _stack_region(parameter.shape, *shard_bounds(parameter.shape, order, mesh.shape, at))
        for rank, at in ranks.items()
    }
    here = regions[int(mesh.mesh[tuple(own)])]
    num_copies = math.prod(mesh.shape[a] for a in copies)
    _check_regions(parameter, list(regions.values()), here, num_copies)
    if not axes:
        return ShardLayout((here,))
    group = _group_of(mesh, axes, sorted(ranks), process_groups)
    members = tuple(dist.get_process_group_ranks(group))
    replicas = tuple(_number([(ranks[r][a], mesh.shape[a]) for a in copies]) for r in members)
    return ShardLayout(
        tuple(regions[r] for r in members),
        dist.get_rank(group),
        group,
        members,
        replicas if copies else (),
    )


def cutting_order(
    placements: Sequence[Placement], sizes: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Mesh axes of more than one rank that cut, as (mesh axis, tensor dim), first cut first.

    From the outermost axis in, except that an axis which FSDP2 put before others but which cuts
    what they left (`_StridedShard`) comes after them.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if sizes[axis] == 1 or placement.is_replicate():
            continue
        assert isinstance(placement, Shard | _StridedShard), f"{placement} of {placements}"
        if isinstance(placement, Shard):
            order.insert(0, (axis, placement.dim))
        else:
            before = math.prod(sizes[a] for a, dim in order if dim == placement.dim)
            assert placement.split_factor == before, f"{placements} on a mesh of {sizes}"
            order.append((axis, placement.dim))
    return tuple(order)


def shard_bounds(
    shape: Sequence[int],
    order: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[list[int], list[int]]:
    """First cell and one past the last, per dim, at a coordinate of a mesh of `sizes`.

    Each cut is that of torch.chunk: equal parts, then one that is shorter, then empty ones.
    torch's own `_compute_local_shape_and_global_offset` differs from the shards that FSDP2 makes
    where both cuts of one dim are uneven (9 rows, tp 2, then 4 shards): it reads the axes from the
    outermost in (pytorch#161368, pytorch#168134).
    """
    low, high = [0] * len(shape), list(shape)
    for axis, dim in order:
        most = -(-(high[dim] - low[dim]) // sizes[axis])
        low[dim] = min(high[dim], low[dim] + coordinate[axis] * most)
        high[dim] = min(high[dim], low[dim] + most)
    return low, high


def _stack_region(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> ShardRegion:
    """Bounds of a parameter `[R, C]` or `[E, R, C]` as a box."""
    assert len(shape) in (2, 3), f"a matrix or a stack of them, not {tuple(shape)}"
    lead = 3 - len(shape)
    return ShardRegion((0,) * lead + tuple(low), (1,) * lead + tuple(high))


def _ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> dict[int, list[int]]:
    """Ranks that share this rank's place on all axes but `axes`, with their coordinates."""
    own = mesh.get_coordinate()
    assert own is not None, f"this rank is not in {mesh}"
    picked = tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[picked].flatten().tolist()
    ways = [range(n) if axis in axes else [own[axis]] for axis, n in enumerate(mesh.shape)]
    return {rank: list(at) for rank, at in zip(ranks, product(*ways), strict=True)}


def _number(digits: Sequence[tuple[int, int]]) -> int:
    """A coordinate, as (place, size) per axis, counted through: the last axis runs fastest."""
    number = 0
    for place, size in digits:
        number = number * size + place
    return number


def _group_of(
    mesh: DeviceMesh,
    axes: Sequence[int],
    ranks: Sequence[int],
    process_groups: Sequence[dist.ProcessGroup],
) -> dist.ProcessGroup:
    """A group of exactly `ranks`: of the one mesh axis, or one that exists already."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    world = dist.group.WORLD
    assert world is not None
    for group in (*process_groups, world):
        if sorted(dist.get_process_group_ranks(group)) == list(ranks):
            return group
    names = [(mesh.mesh_dim_names or range(mesh.ndim))[axis] for axis in axes]
    raise AssertionError(f"give the optimizer the process group of {names}: ranks {list(ranks)}")


def _check_regions(
    parameter: DTensor, regions: Sequence[ShardRegion], here: ShardRegion, copies: int
) -> None:
    """The boxes hold every cell once a copy, and this rank's is as large as what it stores."""
    local = stack_view(parameter.to_local())
    where = f"{tuple(parameter.shape)} {parameter.placements} on {parameter.device_mesh}"
    assert tuple(local.shape) == here.shape or local.numel() == here.size == 0, (
        f"{where}: {tuple(local.shape)} here, not {here}"
    )
    assert sum(region.size for region in regions) == copies * parameter.numel(), (
        f"{where}: {regions}"
    )
