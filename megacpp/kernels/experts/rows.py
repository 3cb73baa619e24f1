"""Tokens to the rows of their experts and back: sort once, then gathers in both directions.

Legend: T tokens, K experts of a token, E experts, N = T * K copies in (token, choice) order, S
slots (rows in expert order), D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacpp.kernels.experts.sizes import most_slots
from megacpp.model.transfer import listed


@dataclass(frozen=True)
class Groups:
    """Slots of the copies of T tokens: S slots, ordered by expert, padded with copies of token 0.

    Attributes:
        slot_KT: int64, the slot of each copy; 0 for a copy that has none.
        token_S: int64, the token in each slot; 0 in a padding slot.
        counts_E: slots of each expert in order (the last also owns any slots past the sum), as a
            list where the host knows them, or None when every expert has S / E. With one number
            more than experts the last is of slots that no expert owns: their content is undefined.
        kept_KT: bool, copies that have a slot; None: all of them.
        backend: of `experts`, by which rows are moved (megacpp/kernels/selection.py).
    """

    slot_KT: Tensor
    token_S: Tensor
    counts_E: Tensor | list[int] | None
    kept_KT: Tensor | None = None
    backend: str = "torch"

    def by(self, backend: str) -> Groups:
        """Return the same groups, whose rows that backend moves."""
        return replace(self, backend=backend)


def group_rows(
    expert_TK: Tensor, num_experts: int, multiple: int = 1, expected: Fraction | int | None = None
) -> Groups:
    """Return groups that hold every copy, each padded to a multiple of `multiple` slots.

    One stable sort, so copies keep their token order within an expert. S is exact on a CPU; on
    other devices it is the most that these shapes can need, so that the host never waits.

    Args:
        expert_TK: chosen experts.
        num_experts: E.
        multiple: of slots.
        expected: copies of a token that have an expert, on average, where others are of no expert
            (`num_experts`) and have no slot; None: all have one.
    """
    if expected is not None:
        return _group_owned(expert_TK, num_experts, multiple)
    sorted_N, order_N, first_E = _sort(expert_TK, num_experts)
    size_E = torch.diff(first_E, append=first_E.new_full((1,), expert_TK.numel()))
    padded_E = (size_E + (multiple - 1)) // multiple * multiple
    shift_E = padded_E.cumsum(0) - padded_E - first_E
    slot_N = torch.arange(len(sorted_N), device=sorted_N.device) + shift_E[sorted_N]
    slots = _slots(padded_E, len(sorted_N), multiple)
    token_S = slot_N.new_zeros(slots).scatter_(0, slot_N, order_N // expert_TK.shape[1])
    return Groups(_unsort(slot_N, order_N, expert_TK), token_S, padded_E)


def _group_owned(expert_TK: Tensor, num_experts: int, multiple: int) -> Groups:
    """Group copies some of which are of no expert; slots past the groups are of none either.

    A token chooses an expert once, so it has no more copies than there are experts.
    """
    sorted_N, order_N, first_X = _sort(expert_TK, num_experts + 1)  # the last: of no expert
    size_E = torch.diff(first_X)
    padded_E = (size_E + (multiple - 1)) // multiple * multiple
    shift_X = torch.zeros_like(first_X)
    shift_X[:-1] = padded_E.cumsum(0) - padded_E - first_X[:-1]
    kept_N = sorted_N < num_experts
    slot_N = torch.arange(len(sorted_N), device=sorted_N.device) + shift_X[sorted_N]
    slots = _slots(padded_E, len(expert_TK) * min(expert_TK.shape[1], num_experts), multiple)
    token_S = slot_N.new_zeros(slots + 1)  # the last slot takes what has none
    token_S.scatter_(0, torch.where(kept_N, slot_N, slots), order_N // expert_TK.shape[1])
    slot_KT = _unsort(torch.where(kept_N, slot_N, 0), order_N, expert_TK)
    counts_X = torch.cat([padded_E, (slots - padded_E.sum()).view(1)])
    return Groups(slot_KT, token_S[:-1], counts_X, _unsort(kept_N, order_N, expert_TK))


def _slots(padded_E: Tensor, copies: int, multiple: int) -> int:
    """Return the slots of groups of these sizes; where the host can't see them, the most."""
    if padded_E.device.type == "cpu":
        return int(padded_E.sum())
    return most_slots(len(padded_E), copies, multiple)


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
        return Groups(_unsort(slot_N, order_N, expert_TK), token_S, padded)
    kept_N = place_N < owned
    slot_KT = _unsort(torch.where(kept_N, slot_N, 0), order_N, expert_TK)
    return Groups(slot_KT, token_S, padded, _unsort(kept_N, order_N, expert_TK))


def group_rows_to_capacity(expert_TK: Tensor, num_experts: int, capacity: int) -> Groups:
    """Return groups of exactly `capacity` slots; copies past that are dropped, latest first.

    Shapes are static and the host never waits. A copy for expert `num_experts` has no slot.
    Dropping by token order keeps a causal model causal: no token can lose its place to a later one.
    """
    sorted_N, order_N, first_E = _sort(expert_TK, num_experts)
    place_N = torch.arange(len(sorted_N), device=sorted_N.device)
    place_N -= first_E[sorted_N.clamp(max=num_experts - 1)]
    kept_N = (place_N < capacity) & (sorted_N < num_experts)
    slot_N = sorted_N * capacity + place_N
    slots = num_experts * capacity
    token_S = slot_N.new_zeros(slots + 1)  # the last slot takes dropped copies
    token_S.scatter_(0, torch.where(kept_N, slot_N, slots), order_N // expert_TK.shape[1])
    slot_KT = _unsort(torch.where(kept_N, slot_N, 0), order_N, expert_TK)
    return Groups(slot_KT, token_S[:-1], None, _unsort(kept_N, order_N, expert_TK))


def spread_rows(x_TD: Tensor, groups: Groups) -> Tensor:
    """Copy tokens `[T, D]` to their slots `[S, D]`; gradients of a token's copies are summed."""
    return _CopyRows.apply(x_TD, groups)  # type: ignore[return-value]


def gather_rows(rows_SD: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
    """Weighted sum of each token's rows, `[T, D]` in the dtype of the weights (fp32 or fp64)."""
    return _WeighedSum.apply(rows_SD, weights_TK, groups)  # type: ignore[return-value]


def weigh_slots(weights_TK: Tensor, groups: Groups) -> Tensor:
    """Return the weight of the copy in each slot, `[S]`; 0 in a padding slot."""
    return _Weigh.apply(weights_TK, groups)  # type: ignore[return-value]


def sum_rows(rows_SD: Tensor, groups: Groups) -> Tensor:
    """Sum each token's rows, `[T, D]` in at least fp32; saves no row.

    A padding slot adds nothing, but its gradient is that of token 0: if there are any,
    the rows must have been weighed with `weigh_slots`.
    """
    return _Sum.apply(rows_SD, groups)  # type: ignore[return-value]


def _sort(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return expert ids and copies in expert order (by token within), and each expert's first."""
    sorted_N, order_N = torch.sort(expert_TK.flatten(), stable=True)
    every_E = torch.arange(num_experts, device=expert_TK.device)
    return sorted_N, order_N, torch.searchsorted(sorted_N, every_E)


def _unsort(value_N: Tensor, order_N: Tensor, expert_TK: Tensor) -> Tensor:
    """Return values in sorted order as `[K, T]`."""
    back_N = torch.empty_like(value_N).scatter_(0, order_N, value_N)
    return back_N.view(expert_TK.shape).T.contiguous()


def rows_of_slots(x_TD: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the row of the token in each slot, `[S, D]`, in `dtype`; no gradient."""
    if groups.backend == "triton":
        from megacpp.kernels.experts import triton as experts_triton

        return experts_triton.spread(x_TD, groups.token_S, dtype)
    return x_TD.to(dtype).index_select(0, groups.token_S)


def sum_of_slots(rows_SD: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each token's slots, `[T, D]`, in at least fp32; no gradient."""
    if groups.backend == "triton":
        from megacpp.kernels.experts import triton as experts_triton

        return experts_triton.sum_of_slots(rows_SD, groups.slot_KT, groups.kept_KT)
    if not len(groups.token_S):  # no token has a slot
        return _at_least_fp32(rows_SD.new_zeros(groups.slot_KT.shape[1], rows_SD.shape[1]))
    total_TD: Tensor | None = None
    for k, slot_T in enumerate(groups.slot_KT):
        part_TD = _at_least_fp32(rows_SD.index_select(0, slot_T))
        if groups.kept_KT is not None:
            part_TD.masked_fill_(~groups.kept_KT[k, :, None], 0.0)
        total_TD = part_TD if total_TD is None else total_TD.add_(part_TD)
        del part_TD  # before the next is made: they are the largest of a block
    assert total_TD is not None
    return total_TD


def _weights_of_slots(weights_KT: Tensor, groups: Groups) -> Tensor:
    """Return the weight of each slot, `[S]`; 0 for padding, whatever dropped copies have."""
    slots, slot_KT = len(groups.token_S), groups.slot_KT
    if groups.kept_KT is not None:
        slot_KT = torch.where(groups.kept_KT, slot_KT, slots)
    w_S = weights_KT.new_zeros(slots + 1)
    return w_S.scatter_(0, slot_KT.flatten(), weights_KT.flatten())[:-1]


def _copies_of_slots(value_S: Tensor, groups: Groups) -> Tensor:
    """Return the value in the slot of each copy, `[K, T]`; 0 for a dropped one."""
    if not len(groups.token_S):
        return value_S.new_zeros(groups.slot_KT.shape)
    value_KT = value_S.index_select(0, groups.slot_KT.flatten()).view_as(groups.slot_KT)
    if groups.kept_KT is not None:
        value_KT.masked_fill_(~groups.kept_KT, 0.0)
    return value_KT


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _CopyRows(torch.autograd.Function):
    """Copies of rows, summed in backward. Both are gathers: no atomics, so sums have one order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return rows_of_slots(x_TD, groups, x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_SD,) = grads
        return sum_of_slots(grad_SD, ctx.groups).to(grad_SD.dtype), None


class _Sum(torch.autograd.Function):
    """Adjoint of `_CopyRows`."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, groups: Groups) -> Tensor:
        ctx.groups, ctx.dtype = groups, rows_SD.dtype
        return sum_of_slots(rows_SD, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return rows_of_slots(grads[0], ctx.groups, ctx.dtype), None


class _Weigh(torch.autograd.Function):
    """Weights by slot and, in backward, gradients by copy; none for a copy without a slot."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return _weights_of_slots(weights_TK.T, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _copies_of_slots(grads[0], ctx.groups).T, None


class _WeighedSum(torch.autograd.Function):
    """Sum y_t = sum_k w_tk row(slot_kt), accumulated in the dtype of the weights."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, weights_TK: Tensor, groups: Groups) -> Tensor:
        weights_KT = weights_TK.T.contiguous()
        if groups.kept_KT is not None:
            weights_KT = weights_KT.masked_fill(~groups.kept_KT, 0.0)
        ctx.save_for_backward(rows_SD, weights_KT)
        ctx.groups = groups
        if groups.backend == "triton":
            from megacpp.kernels.experts import triton as experts_triton

            given = rows_SD, groups.slot_KT, groups.kept_KT, weights_KT
            return experts_triton.sum_of_slots(*given)
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
        w_S = _weights_of_slots(weights_KT, groups)
        if groups.backend == "triton":
            from megacpp.kernels.experts import triton as experts_triton

            given = grad_TD, groups.token_S, w_S, rows_SD
            grad_SD, dot_S = experts_triton.spread_weighed(*given)
            return grad_SD, _copies_of_slots(dot_S, groups).T, None
        grad_SD = grad_TD.index_select(0, groups.token_S)
        grad_w_KT = _copies_of_slots((rows_SD * grad_SD).sum(-1), groups)
        return grad_SD.mul_(w_S[:, None]).to(rows_SD.dtype), grad_w_KT.T, None
