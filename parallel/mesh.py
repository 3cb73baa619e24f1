"""Ranks of a run as named mesh axes, or one process without a process group.

Ranks are numbered with `pp` outermost and `tp` innermost. The same ranks are seen twice:

    dense    pp  dp_replicate  dp_shard  cp  tp
    experts  pp  dp_replicate  efsdp         ep     efsdp * ep = dp_shard * cp * tp

and through views of the dense axes: `batch` = dp_replicate x dp_shard (ranks with rows of their
own), `fsdp` = dp_shard x cp (ranks that share the storage of dense parameters), `loss` = batch x cp
(ranks with tokens of their own), `row` = cp x tp (ranks that work on the same rows), `folded` =
dp_shard x cp x tp (ranks that hold one replica of a stage), `stage` = all but pp (ranks that hold
the same layers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class World:
    """Rank of this process, and its meshes.

    Attributes:
        meshes: every axis and view by name, and two that FSDP2 shards over: `shard` for dense
            parameters and `expert_shard` for routed experts, two-dimensional (replicas x shards)
            under HSDP. Empty for one process, where no process group exists.
    """

    rank: int
    size: int
    device: torch.device
    meshes: Mapping[str, DeviceMesh] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def parallel(self) -> bool:
        """Whether there is a mesh (which may still be of one rank, in tests)."""
        return bool(self.meshes)

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each axis; empty for one process."""
        names = (*DENSE, "ep") if self.parallel else ()
        return {name: self.degree(name) for name in names}

    def degree(self, axis: str) -> int:
        """Ranks along an axis or view."""
        return self.meshes[axis].size() if self.parallel else 1

    def coordinate(self, axis: str) -> int:
        """Return this rank's position along an axis or view."""
        return self.meshes[axis].get_local_rank() if self.parallel else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks along an axis that share this rank's other coordinates."""
        return self.meshes[axis].get_group()

    @property
    def holders(self) -> list[dist.ProcessGroup]:
        """Groups of ranks over which a matrix may be sharded along several axes."""
        return [self.group(axis) for axis in ("folded", "stage")] if self.parallel else []

    def sum(self, values: Tensor, axis: str) -> Tensor:
        """Sum `values`, of any shape, over the ranks of an axis or view, in place; return them."""
        if self.degree(axis) > 1:
            dist.all_reduce(values, group=self.group(axis))
        return values

    def max(self, values: Tensor, axis: str) -> Tensor:
        """Take the largest `values`, of any shape, over an axis or view, in place; return them."""
        if self.degree(axis) > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group(axis))
        return values

    def close(self) -> None:
        """Wait for all ranks and end the process group; safe on one process."""
        if self.parallel and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
