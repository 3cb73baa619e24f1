"""Counts the collectives that a rank issues: which operation, how many, how many bytes.

    with CollectiveCounter() as seen:
        loss.backward()
    assert seen.count("reduce_scatter") == 3
    assert seen.bytes("all_gather", torch.bfloat16) == 2 * 1000

It counts what reaches the process group: FSDP2's in-place operations, `torch.distributed` calls,
functional collectives and those that DTensor issues inside an operator. Only this thread's
forward and the backward that it starts are seen; collectives that torch issues from C++ (the
buckets of DDP) are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Operator name (of `c10d` or `_c10d_functional`) -> what it is. Waits and point-to-point calls
# count as nothing; `barrier` is counted because it synchronises.
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
}
SPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True)
class Collective:
    """One call on this rank.

    `numel` is of the larger side that this rank knows: gathered, or before the reduction; of a
    scatter or gather only the root knows more than its own part.
    """

    kind: str
    dtype: torch.dtype
    numel: int

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class CollectiveCounter(TorchDispatchMode):
    """Records every collective issued inside the `with` block, in order, as `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def of(self, kind: str, dtype: torch.dtype | None = None) -> list[Collective]:
        """The recorded calls of a kind (and dtype)."""
        return [c for c in self.calls if c.kind == kind and dtype in (None, c.dtype)]

    def count(self, kind: str, dtype: torch.dtype | None = None) -> int:
        return len(self.of(kind, dtype))

    def bytes(self, kind: str, dtype: torch.dtype | None = None) -> int:
        return sum(c.bytes for c in self.of(kind, dtype))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor turn into local operators and collectives first
        out = func(*args, **(kwargs or {}))
        # Higher-order operators have no overload packet, and are no collectives.
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        if getattr(func, "namespace", "") in SPACES and name in KINDS:
            self.calls.append(_collective(KINDS[name], (args, kwargs, out)))
        return out


def _collective(kind: str, values: Any) -> Collective:
    """The largest list of tensors, or tensor, among arguments and results tells the size."""
    lists = pytree.tree_leaves(values, is_leaf=_is_tensor_list)
    sizes = [_size(v) for v in lists if isinstance(v, Tensor) or _is_tensor_list(v)]
    numel, dtype = max(sizes, key=lambda size: size[0], default=(0, torch.uint8))
    return Collective(kind, dtype, numel)


def _is_tensor_list(value: Any) -> bool:
    """A list of tensors, or of such lists (`all_gather` has one list per rank)."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(v, Tensor) or _is_tensor_list(v) for v in value)
    )


def _size(value: Tensor | list[Any]) -> tuple[int, torch.dtype]:
    leaves: list[Tensor] = pytree.tree_leaves(value)
    return sum(t.numel() for t in leaves), leaves[0].dtype
