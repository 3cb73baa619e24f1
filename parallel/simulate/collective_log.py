"""Log of the collectives that a rank issues: kind, mesh axis, bytes, scope.

    with CollectiveLog(world.meshes) as log:
        loss.backward()
    log.count("reduce_scatter", axis="fsdp"), log.bytes("all_gather", axis="tp")

It records calls that reach the process group: FSDP2's in-place operations, `torch.distributed`,
functional collectives and those that DTensor issues inside an operator, on real, fake and simulated
groups, with real and fake tensors. Only this thread's forward and the backward that it starts are
seen; collectives that torch issues from C++ (the buckets of DDP) are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Operator name (of `c10d` or `_c10d_functional`) -> kind. Waits aren't counted; `barrier`
# is counted because it synchronises.
KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
POINT_TO_POINT = ("send", "recv")
SPACES = ("c10d", "_c10d_functional")

# Meshes over the same ranks share a process group; a call on it is named after the first of these.
# Views come after axes, and wide views after narrow ones.
PREFERRED = (
    *("tp", "cp", "ep", "pp", "dp_shard", "efsdp", "dp_replicate"),
    *("fsdp", "batch", "row", "loss", "folded", "stage", "world"),
)
MODEL_AXES = ("tp", "cp", "ep", "pp")
ELSEWHERE = "?"  # a group that is no mesh axis


@dataclass(frozen=True)
class Collective:
    """Call of a collective on this rank.

    `numel` is of the larger side that this rank knows: gathered, or before the reduction; of a
    scatter or gather only the root knows more than its own part. Two calls are equal if kind, dtype
    and size are, wherever they were made.

    Attributes:
        axis: mesh axis or view that the ranks are, by PREFERRED.
        axes: every axis and view with the same ranks.
        scope: `CollectiveLog.scope` at the time of the call.
        in_place: into a tensor that existed, as FSDP2 and `torch.distributed` do it.
        shapes: of the first tensor that goes in and the first that comes out.
    """

    kind: str
    dtype: torch.dtype
    numel: int
    axis: str = field(default=ELSEWHERE, compare=False)
    axes: tuple[str, ...] = field(default=(), compare=False)
    scope: str = field(default="", compare=False)
    shapes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    in_place: bool = field(default=False, compare=False)

    @property
    def bytes(self) -> int:
        """Bytes of the larger side."""
        return self.numel * self.dtype.itemsize


class CollectiveLog(TorchDispatchMode):
    """Log of every collective issued inside the `with` block, in order, as `calls`.

    Args:
        meshes: axes and views by name (`World.meshes`), to name calls by; two-dimensional meshes
            count by the names of their dims. Axes of one rank name nothing.

    Attributes:
        scope: set it to whatever is going on; calls remember it.
    """

    def __init__(self, meshes: Mapping[str, DeviceMesh] | None = None) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.scope = ""
        self._axes = group_names(meshes or {})

    def select(
        self, kind: str = "", dtype: torch.dtype | None = None, axis: str = "", scope: str = ""
    ) -> list[Collective]:
        """Return the recorded calls that match all given properties.

        Args:
            kind: such as `all_gather`; empty: any.
            dtype: None: any.
            axis: axis or view; empty: any.
            scope: empty: any.
        """
        return [
            c
            for c in self.calls
            if kind in ("", c.kind)
            and dtype in (None, c.dtype)
            and (not axis or axis == c.axis or axis in c.axes)
            and scope in ("", c.scope)
        ]

    def count(
        self, kind: str = "", dtype: torch.dtype | None = None, axis: str = "", scope: str = ""
    ) -> int:
        """Return the number of matching calls.

        Args:
            kind: such as `all_gather`; empty: any.
            dtype: None: any.
            axis: axis or view; empty: any.
            scope: empty: any.
        """
        return len(self.select(kind, dtype, axis, scope))

    def bytes(
        self, kind: str = "", dtype: torch.dtype | None = None, axis: str = "", scope: str = ""
    ) -> int:
        """Return the bytes of matching calls, each of its larger side.

        Args:
            kind: such as `all_gather`; empty: any.
            dtype: None: any.
            axis: axis or view; empty: any.
            scope: empty: any.
        """
        return sum(c.bytes for c in self.select(kind, dtype, axis, scope))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # let DTensor turn into local operators and collectives first
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in SPACES:
            name = func.overloadpacket.__name__
            if name in KINDS:
                call = self._call(KINDS[name], (args, kwargs), out, func.namespace == "c10d")
                self.calls += [call] if call else []
        return out

    def _call(self, kind: str, given: Any, out: Any, in_place: bool) -> Collective | None:
        """Return the call, of the size of the largest tensor or list of tensors in or out."""
        lists = pytree.tree_leaves((given, out), is_leaf=_is_tensor_list)
        tensors = [v for v in lists if isinstance(v, Tensor) or _is_tensor_list(v)]
        numel, dtype = max(map(_size, tensors), key=lambda s: s[0], default=(0, torch.uint8))
        axes = self._axes.get(_group_of(given), ())
        shapes = tuple(tuple(pytree.tree_leaves(v)[0].shape) for v in tensors)
        axis = _axis(kind, axes, in_place)
        ends = (*shapes[:1], *shapes[-1:])
        return Collective(kind, dtype, numel, axis, axes, self.scope, ends, in_place)


def group_names(meshes: Mapping[str, DeviceMesh]) -> dict[str, tuple[str, ...]]:
    """Return the axes and views of each process group by its name, most specific first."""
    found: dict[str, set[str]] = {}
    for name, mesh in meshes.items():
        dims = mesh.mesh_dim_names or ()
        for i, dim in enumerate(dims):
            if mesh.size(i) > 1:
                found.setdefault(mesh.get_group(i).group_name, set()).add(
                    name if mesh.ndim == 1 and name in PREFERRED else dim
                )
    return {group: tuple(sorted(names, key=_rank_of_name)) for group, names in found.items()}


def _axis(kind: str, axes: tuple[str, ...], in_place: bool) -> str:
    """Return the name of the axis of a call on a group that several axes share, by its kind.

    Of all-reduces on all ranks only those of `tp` belong to an axis, the rest are about the run;
    all-to-alls that write in place are an optimizer's; `tp` never exchanges.
    """
    if "world" in axes:
        sums = kind in ("all_reduce", "broadcast", "barrier") and "tp" not in axes
        if sums or (kind == "all_to_all" and in_place):
            return "world"
    if kind == "all_to_all" and "ep" in axes and "cp" not in axes:
        return "ep"
    return axes[0] if axes else ELSEWHERE


def _rank_of_name(name: str) -> tuple[int, str]:
    return (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED)), name


def _group_of(given: Any) -> str:
    """Name of the group in the arguments of an operator: `c10d` gets it boxed, others by name."""
    for leaf in reversed(pytree.tree_leaves(given)):
        if isinstance(leaf, dist.ProcessGroup):
            return leaf.group_name
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf).group_name
        if isinstance(leaf, str) and leaf not in ("sum", "avg", "max", "min", "product"):
            return leaf
    return ""


def _is_tensor_list(value: Any) -> bool:
    """Whether a value is a list of tensors, or of such lists (`all_gather` has one per rank)."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(v, Tensor) or _is_tensor_list(v) for v in value)
    )


def _size(value: Tensor | list[Any]) -> tuple[int, torch.dtype]:
    leaves: list[Tensor] = pytree.tree_leaves(value)
    return sum(t.numel() for t in leaves), leaves[0].dtype
