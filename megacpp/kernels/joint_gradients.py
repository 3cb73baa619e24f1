"""Weights that read one input: one cast of them all, and their gradients as one product with it.

Legend: S rows, D input width, O outputs of one weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def joint_gradients(
    rows: list[Tensor],
    weights: Sequence[Tensor],
    x_SD: Tensor,
    need_x: bool,
    need_w: bool,
    dtypes: Sequence[torch.dtype],
    below: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]] | None:
    """Return the gradients of x and of all weights; None: `rows` in one matrix would be a copy.

    A compiler's kernels write each gradient to its place in the matrix. Eagerly those of a SwiGLU's
    gate and up, by Triton, are halves of one tensor. Gradients of weights share memory.

    Args:
        rows: gradients of the products, each `[S, O]`.
        weights: each `[O, D]`.
        x_SD: input of the products.
        need_x: that of x is wanted.
        need_w: those of all weights are wanted.
        dtypes: of the weights' gradients, which are one cast where they are alike.
        below: all weights one below the other, `[sum of O, D]`; None: they lie apart.
    """
    joint = torch.cat(rows, 1) if torch.compiler.is_compiling() else _side_by_side(rows)
    if joint is None:
        return None
    sizes = [dy.shape[1] for dy in rows]
    dx_SD = None
    if need_x:
        parts = joint.split(sizes, 1)
        dx_SD = _input_gradient(parts, weights, joint) if below is None else joint @ below
    if not need_w:
        return dx_SD, [None] * len(rows)
    dw = joint.mT @ x_SD
    return dx_SD, [*(dw.to(dtypes[0]) if len({*dtypes}) == 1 else dw).split(sizes)]


def one_cast(weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return weights in another dtype, one below the other, `[sum of O, D]`.

    Args:
        weights: each `[O, D]`.
        dtype: of the result.
    """
    if torch.compiler.is_compiling():  # its kernel casts and writes each to its place
        return torch.cat(weights).to(dtype)
    outputs = [*map(len, weights)]
    joint = weights[0].new_empty(sum(outputs), weights[0].shape[1], dtype=dtype)
    torch._foreach_copy_(joint.split(outputs), weights)
    return joint


def _input_gradient(rows: Sequence[Tensor], weights: Sequence[Tensor], joint: Tensor) -> Tensor:
    """Return the sum of `dy @ weight`, `[S, D]`."""
    # To copy all weights is less than to read and write a sum for each but one of them.
    if (len(rows) - 1) * len(joint) > joint.shape[1]:
        return joint @ torch.cat([*weights])
    if torch.compiler.is_compiling():  # what reads the sum adds; an addmm would copy its start
        parts = (dy[None] @ weight for dy, weight in zip(rows, weights, strict=True))
        return reduce(torch.add, parts)[0]
    total = torch.mm(rows[0], weights[0])
    for dy, weight in zip(rows[1:], weights[1:], strict=True):
        torch.addmm(total, dy, weight, out=total)  # FlopCounterMode doesn't know addmm_
    return total


def _side_by_side(rows: list[Tensor]) -> Tensor | None:
    """Return the matrix whose columns are those of all `rows` in memory, or None."""
    first, at = rows[0], rows[0].storage_offset()
    width = sum(dy.shape[1] for dy in rows)
    for dy in rows:
        same = dy.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or dy.stride() != (width, 1) or dy.storage_offset() != at:
            return None
        at += dy.shape[1]
    return first.as_strided((len(first), width), (width, 1))
