"""Collectives with gradients: each forward names its own backward.

Every function takes this rank's local tensor and a process group, and returns a local tensor. On a
group of one rank each is the identity. They call the functional operators of torch directly, so
fake, simulated and real groups, fake tensors and the compiler all see them.

    gather        A[I_X, J] -> A[I, J]                backward: reduce-scatter
    scatter_sum   A[I, J]{partial X} -> A[I_X, J]     backward: all-gather
    all_sum       A[I]{partial X} -> A[I]             backward: all-reduce

Rows and parts of a dim that change their ranks are in all_to_all.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = torch.ops._c10d_functional


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the parts of all ranks joined along `dim`, in rank order.

    Backward sums the gradients of all ranks and returns this rank's part, so that ranks may use
    the whole for different work.
    """
    return x if group.size() == 1 else _Gather.apply(x, dim, group)  # type: ignore[return-value]


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks.

    `dim` must divide by the group's size. Backward gathers the parts of the gradient.
    """
    return x if group.size() == 1 else _ScatterSum.apply(x, dim, group)  # type: ignore[return-value]


def all_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, whole on each of them.

    Backward sums the gradients too: each rank uses the sum for a part of the work of its own.
    """
    return x if group.size() == 1 else _AllSum.apply(x, group)  # type: ignore[return-value]


def gather_plain(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return `gather` without a gradient, of any dtype."""
    n = group.size()
    if n == 1:
        return x
    out = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), n, group.group_name))
    if dim == 0:
        return out
    return out.view(n, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def scatter_sum_plain(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return `scatter_sum` without a gradient."""
    n = group.size()
    if n == 1:
        return x
    assert x.shape[dim] % n == 0, f"dim {dim} of {tuple(x.shape)} is cut into {n}"
    parts = x if dim == 0 else x.unflatten(dim, (n, -1)).movedim(dim, 0).flatten(0, 1)
    name = group.group_name
    return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", n, name))


def all_sum_plain(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `all_sum` without a gradient, in a new tensor."""
    if group.size() == 1:
        return x
    return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), "sum", group.group_name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_plain(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sum_plain(grads[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return scatter_sum_plain(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_plain(grads[0], ctx.dim, ctx.group), None, None


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_sum_plain(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_sum_plain(grads[0], ctx.group), None
