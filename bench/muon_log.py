"""Bytes sent and FLOPs of one optimizer step on one rank, counted below DTensor."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from parallel.simulate.collective_log import Collective, CollectiveLog

# Operators that multiply matrices -> where their two factors are among the arguments.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}


class StepLog(CollectiveLog):
    """Collectives of the `with` block, the bytes that this rank sends, FLOPs of its products.

    Every collective is taken to run on all ranks. An all-to-all is counted exactly, less what stays
    here; the others as a ring runs them: W - 1 of W parts of the whole for a gather or a
    reduce-scatter, twice that for an all-reduce.

    Attributes:
        sent: bytes.
        flops: multiplications and additions of matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.flops = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if out is not NotImplemented and func.namespace == "aten" and name in PRODUCTS:
            left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            self.flops += 2 * left.numel() * right.shape[-1]
        return out

    def _call(self, kind: str, given: Any, out: Any, in_place: bool) -> Collective | None:
        call = super()._call(kind, given, out, in_place)
        size = dist.get_world_size()
        if call is not None and kind == "all_to_all":
            self.sent += _leaving(given[0], in_place) * call.dtype.itemsize
        elif call is not None and kind != "barrier":
            self.sent += call.bytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)
        return call


def _leaving(args: Any, in_place: bool) -> int:
    """Elements of an all-to-all's input that go to other ranks.

    Arguments are those of `c10d` (output, input, group, sizes out, sizes in) or of the functional
    form (input, sizes out, sizes in); the input of `alltoall_` is a list, one tensor per rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    given = args[1] if in_place else args[0]
    if not isinstance(given, Tensor):
        parts = [t.numel() for t in pytree.tree_leaves(given)]
        return sum(parts) - parts[rank]
    rows = list(args[4] if in_place else args[2]) or [given.shape[0] // size] * size
    return given.numel() - (rows[rank] * given[0].numel() if given.numel() else 0)
