"""Regions of a sharded matrix, or of a stack of matrices, that each rank holds.

Placements on a mesh shard a parameter into rectangular regions: tensor parallelism shards rows or
columns, expert parallelism shards the experts, and FSDP2 shards the rows, or the experts, of what
is left. All regions are computed from shapes and placements, so each rank knows the regions of all
ranks without communication.

Legend: E matrices of a stack (1 for a single matrix), R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor

from megacpp.torch_extras import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


class ShardRegion(NamedTuple):
    """Cells `[low, high)` of a parameter viewed as `[E, R, C]`.

    Attributes:
        low: first cell per dim.
        high: one past the last cell per dim.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of cells per dim."""
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    @property
    def size(self) -> int:
        """Total number of cells."""
        return math.prod(self.shape)

    def intersection(self, other: ShardRegion) -> ShardRegion | None:
        """Return the cells that both regions contain, or None if they are disjoint."""
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        return (
            ShardRegion(low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None
        )

    def slices_in(self, outer: ShardRegion) -> tuple[slice, ...]:
        """Return the slices that select this region in a tensor that holds the cells of `outer`."""
        edges = zip(self.low, self.high, outer.low, strict=True)
        return tuple(slice(a - first, b - first) for a, b, first in edges)


@dataclass(frozen=True)
class ShardLayout:
    """Regions of one parameter on the ranks of a group that holds it once, or several times.

    Attributes:
        regions: region per rank of `group`.
        rank: index of this process in `group`.
        group: None if this process holds all cells.
        ranks: global ranks of `group`; empty without a group.
        replicas: per rank of `group`, the index of the replica that its region belongs to; empty if
            there is a single replica.
    """

    regions: tuple[ShardRegion, ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()

    def replica(self, rank: int) -> int:
        """Return the index of the replica that `rank` of the group belongs to."""
        return self.replicas[rank] if self.replicas else 0

    @property
    def num_replicas(self) -> int:
        """Number of complete copies of the parameter in the group."""
        return max(self.replicas, default=0) + 1


def stack_view(t: Tensor) -> Tensor:
    """View a matrix `[R, C]` or a stack `[E, R, C]` as `[E, R, C]`, sharing memory.

    Args:
        t: `[R, C]` or `[E, R, C]`.
    """
    assert t.dim() in (2, 3), f"a matrix or a stack of them, not {tuple(t.shape)}"
    return t if t.dim() == 3 else t[None]


def layout_of(parameter: Tensor, process_groups: Sequence[dist.ProcessGroup] = ()) -> ShardLayout:
    """Return the regions of a plain tensor, or of a DTensor on any mesh.

    The group spans the mesh axes that shard the parameter. If there are such axes, it also spans
    the axes along which the parameter is replicated, so that the replicas share the work.

    Args:
        parameter: `[R, C]` or `[E, R, C]`.
        process_groups: groups that span several mesh axes, searched where the parameter's group
            does; the group of all ranks is always searched. No group is created here: NCCL needs
            ranks that don't hold the parameter to take part in the creation.
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
    """Return the mesh axes that shard, as (mesh axis, tensor dim), in the order of application.

    Axes of one rank are left out. The order is from the outermost axis in, except for an axis that
    FSDP2 placed before others although it shards what they leave (`_StridedShard`): it comes after
    them.

    Args:
        placements: one per mesh axis.
        sizes: ranks per mesh axis.
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
    """Return the first cell and one past the last cell, per dim, of the shard at a mesh coordinate.

    Each axis splits like torch.chunk: equal parts, then a shorter one, then empty ones. torch's own
    `_compute_local_shape_and_global_offset` differs from the shards that FSDP2 makes where both
    splits of one dim are uneven (9 rows, tp 2, then 4 shards), because it applies the axes from the
    outermost in (pytorch#161368, pytorch#168134).

    Args:
        shape: global shape of the parameter.
        order: result of `cutting_order`.
        sizes: ranks per mesh axis.
        coordinate: position on each mesh axis.
    """
    low, high = [0] * len(shape), list(shape)
    for axis, dim in order:
        most = -(-(high[dim] - low[dim]) // sizes[axis])
        low[dim] = min(high[dim], low[dim] + coordinate[axis] * most)
        high[dim] = min(high[dim], low[dim] + most)
    return low, high


def _stack_region(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> ShardRegion:
    """Convert bounds in `[R, C]` or `[E, R, C]` to a region of `[E, R, C]`."""
    assert len(shape) in (2, 3), f"a matrix or a stack of them, not {tuple(shape)}"
    lead = 3 - len(shape)
    return ShardRegion((0,) * lead + tuple(low), (1,) * lead + tuple(high))


def _ranks_along(mesh: DeviceMesh, axes: Sequence[int]) -> dict[int, list[int]]:
    """Return the coordinates of all ranks that differ from this rank in `axes` only, by rank."""
    own = mesh.get_coordinate()
    assert own is not None, f"this rank is not in {mesh}"
    picked = tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))
    ranks: list[int] = mesh.mesh[picked].flatten().tolist()
    ways = [range(n) if axis in axes else [own[axis]] for axis, n in enumerate(mesh.shape)]
    return {rank: list(at) for rank, at in zip(ranks, product(*ways), strict=True)}


def _number(digits: Sequence[tuple[int, int]]) -> int:
    """Convert a coordinate, (place, size) per axis, to an index; the last axis varies fastest."""
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
    """Return an existing group of exactly `ranks`, of a mesh axis or among the candidates."""
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
    """Assert that regions cover each cell once per copy and that this rank's fits its shard."""
    local = stack_view(parameter.to_local())
    where = f"{tuple(parameter.shape)} {parameter.placements} on {parameter.device_mesh}"
    assert tuple(local.shape) == here.shape or local.numel() == here.size == 0, (
        f"{where}: {tuple(local.shape)} here, not {here}"
    )
    assert sum(region.size for region in regions) == copies * parameter.numel(), (
        f"{where}: {regions}"
    )
