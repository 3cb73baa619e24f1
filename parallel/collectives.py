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
    return paired(x, group, (gather_plain, dim, group), (scatter_sum_plain, dim, group))


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks.

    `dim` must divide by the group's size. Backward gathers the parts of the gradient.
    """
    return paired(x, group, (scatter_sum_plain, dim, group), (gather_plain, dim, group))


def all_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, whole on each of them.

    Backward sums the gradients too: each rank uses the sum for a part of the work of its own.
    """
    return paired(x, group, (all_sum_plain, group), (all_sum_plain, group))


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


def paired(
    x: Tensor, group: dist.ProcessGroup, forth: tuple[Any, ...], back: tuple[Any, ...]
) -> Tensor:
    """Return what a collective makes of `x`, with another one as its backward.

    Args:
        x: any shape.
        group: the ranks; of one rank nothing is called.
        forth: function of a tensor without a gradient, and its further arguments.
        back: the same of the gradient.
    """
    return x if group.size() == 1 else _Paired.apply(x, forth, back)  # type: ignore[return-value]


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: tuple[Any, ...], back: tuple[Any, ...]) -> Tensor:
        ctx.back = back
        function, *how = forth
        return function(x, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        function, *how = ctx.back
        return function(grads[0], *how), None, None
