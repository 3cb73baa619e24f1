"""Rows that are grouped, copied and weighed on the way to other ranks and back.

Legend: T tokens, K experts of a token, N = T * K copies, S slots (rows in expert order), D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.experts.rows import (
    Groups,
    copies_of_slots,
    rows_of_slots,
    sum_of_slots,
    unsort,
    weights_of_slots,
)
from megacpp.torch_extras import listed, once_differentiable


def group_rows_of_sizes(expert_TK: Tensor, sizes: Sequence[int], multiple: int = 1) -> Groups:
    """Return the groups of `group_rows` when the host knows how many copies each expert has.

    S is exact on any device and the host never waits. A copy for expert `len(sizes)` has no slot.
    """
    padded = [-(-size // multiple) * multiple for size in sizes]
    first, start = accumulate(sizes, initial=0), accumulate(padded, initial=0)
    shifts = [slot - copy for slot, copy in zip(start, first, strict=True)]
    sorted_N, order_N = torch.sort(expert_TK.flatten(), stable=True)
    place_N = torch.arange(len(sorted_N), device=sorted_N.device)
    slot_N = place_N + listed(shifts, sorted_N.device)[sorted_N]
    owned = sum(sizes)
    token_S = slot_N.new_zeros(sum(padded))
    token_S.scatter_(0, slot_N[:owned], order_N[:owned] // expert_TK.shape[1])
    if owned == len(sorted_N):
        return Groups(unsort(slot_N, order_N, expert_TK), token_S, padded)
    kept_N = place_N < owned
    slot_KT = unsort(torch.where(kept_N, slot_N, 0), order_N, expert_TK)
    return Groups(slot_KT, token_S, padded, unsort(kept_N, order_N, expert_TK))


def spread_rows(x_TD: Tensor, groups: Groups) -> Tensor:
    """Copy tokens `[T, D]` to their slots `[S, D]`; gradients of a token's copies are summed."""
    return _CopyRows.apply(x_TD, groups)  # type: ignore[return-value]


def gather_rows(rows_SD: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
    """Weighted sum of each token's rows, `[T, D]` in the dtype of the weights (fp32 or fp64)."""
    return _WeighedSum.apply(rows_SD, weights_TK, groups)  # type: ignore[return-value]


class _CopyRows(torch.autograd.Function):
    """Copies of rows, summed in backward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return rows_of_slots(x_TD, groups, x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_SD,) = grads
        return sum_of_slots(grad_SD, ctx.groups, dtype=grad_SD.dtype), None


class _WeighedSum(torch.autograd.Function):
    """Sum y_t = sum_k w_tk row(slot_kt), accumulated in the dtype of the weights."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
        weights_KT = weights_TK.T
        if groups.kept_KT is not None:
            weights_KT = weights_KT.masked_fill(~groups.kept_KT, 0.0)
        ctx.save_for_backward(rows_SD, weights_KT)
        ctx.groups = groups
        if groups.backend == "triton":
            from megacpp.kernels.experts import triton as experts_triton

            return experts_triton.sum_of_slots(rows_SD, groups.slot_KT, groups.kept_KT, weights_KT)
        y_TD = weights_KT.new_zeros(weights_KT.shape[1], rows_SD.shape[1])
        for slot_T, w_T in zip(groups.slot_KT, weights_KT, strict=True) if len(rows_SD) else ():
            y_TD.addcmul_(rows_SD.index_select(0, slot_T).to(y_TD.dtype), w_T[:, None])
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_TD,) = grads
        rows_SD, weights_KT = ctx.saved_tensors
        groups: Groups = ctx.groups
        w_S = weights_of_slots(weights_KT, groups)
        if groups.backend == "triton":
            from megacpp.kernels.experts import triton as experts_triton

            given = grad_TD, groups.token_S, w_S, rows_SD
            grad_SD, dot_S = experts_triton.spread_weighed(*given)
            return grad_SD, copies_of_slots(dot_S, groups), None
        grad_SD = grad_TD.index_select(0, groups.token_S)
        grad_w_TK = copies_of_slots((rows_SD * grad_SD).sum(-1), groups)
        return grad_SD.mul_(w_S[:, None]).to(rows_SD.dtype), grad_w_TK, None
