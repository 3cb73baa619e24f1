"""Tokens to the rows of their experts and back: sort once, then gathers in both directions.

Legend: T tokens, K experts of a token, E experts, N = T * K copies in (token, choice) order, S
slots (rows in expert order), D model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.experts.sizes import most_slots
from megacpp.torch_extras import once_differentiable, wide


@dataclass(frozen=True)
class Groups:
    """Slots of the copies of T tokens: S slots, ordered by expert, padded with copies of token 0.

    Attributes:
        slot_KT: int64, the slot of each copy; 0 for a copy that has none. A view of `[T, K]`.
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
    expert_TK: Tensor,
    num_experts: int,
    multiple: int = 1,
    expected: Fraction | int | None = None,
    backend: str = "torch",
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
        backend: of `experts`; Triton's counts instead of sorting, and S is the most on any device.
    """
    if backend == "triton":
        from megacpp.kernels.experts import triton_rows

        return Groups(*triton_rows.group(expert_TK, num_experts, multiple, expected is not None))
    if expected is not None:
        from megacpp.kernels.experts.without_slot import group_owned

        return group_owned(expert_TK, num_experts, multiple)
    _, order_N, slot_N, padded_E = padded_slots(expert_TK, num_experts, multiple)
    slots = slots_of(padded_E, len(slot_N), multiple)
    token_S = slot_N.new_zeros(slots).scatter_(0, slot_N, order_N // expert_TK.shape[1])
    return Groups(unsort(slot_N, order_N, expert_TK), token_S, padded_E)


def padded_slots(
    expert_TK: Tensor, num_experts: int, multiple: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `sort_copies`'s ids and copies, the slots of these, and the slots of each expert.

    A copy of no expert has a slot past the others.
    """
    sorted_N, order_N, first_X = sort_copies(expert_TK, num_experts)
    minus_size_X = first_X[:-1] - first_X[1:]  # 0 in front of that of expert 0
    padding_X = minus_size_X.remainder(multiple)
    shift_N = padding_X.cumsum(0)[sorted_N]  # padding of the experts before
    slot_N = torch.arange(len(sorted_N), device=sorted_N.device) + shift_N
    return sorted_N, order_N, slot_N, padding_X[1:] - minus_size_X[1:]


def slots_of(padded_E: Tensor, copies: int, multiple: int) -> int:
    """Return the slots of groups of these sizes; where the host can't see them, the most."""
    if padded_E.device.type == "cpu":
        return int(padded_E.sum())
    return most_slots(len(padded_E), copies, multiple)


def weigh_slots(weights_TK: Tensor, groups: Groups) -> Tensor:
    """Return the weight of the copy in each slot, `[S]`; 0 in a padding slot."""
    return _Weigh.apply(weights_TK, groups)  # type: ignore[return-value]


def sum_rows(
    rows_SD: Tensor, groups: Groups, plus_TD: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum each token's rows in at least fp32, `[T, D]`; saves no row.

    A padding slot adds nothing, but its gradient is that of token 0: if there are any,
    the rows must have been weighed with `weigh_slots`.

    Args:
        rows_SD: rows in the slots.
        groups: slots.
        plus_TD: added to the sums, before they are rounded.
        dtype: of the result; None: fp32 (or fp64).
    """
    return _Sum.apply(rows_SD, plus_TD, groups, dtype)  # type: ignore[return-value]


def sort_copies(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return expert ids and copies in expert order (by token within), and each expert's first.

    The latter `[E + 2]` begins with a 0 and ends with the number of copies that have an expert.
    """
    sorted_N, order_N = torch.sort(expert_TK.flatten(), stable=True)
    every_X = torch.arange(-1, num_experts + 1, device=expert_TK.device)
    return sorted_N, order_N, torch.searchsorted(sorted_N, every_X)


def unsort(value_N: Tensor, order_N: Tensor, expert_TK: Tensor) -> Tensor:
    """Return values in sorted order as `[K, T]`, a view of `[T, K]`."""
    back_N = torch.empty_like(value_N).scatter_(0, order_N, value_N)
    return back_N.view(expert_TK.shape).T


def rows_of_slots(x_TD: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the row of the token in each slot, `[S, D]`, in `dtype`; no gradient."""
    if groups.backend == "triton":
        from megacpp.kernels.experts import triton as experts_triton

        return experts_triton.spread(x_TD, groups.token_S, dtype)
    return x_TD.to(dtype).index_select(0, groups.token_S)


def sum_of_slots(
    rows_SD: Tensor, groups: Groups, plus_TD: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum of each token's slots, `[T, D]`, in at least fp32; no gradient.

    Args:
        rows_SD: rows in the slots.
        groups: slots.
        plus_TD: added to the sums.
        dtype: to which they are rounded at last; None: they aren't.
    """
    if groups.backend == "triton":
        from megacpp.kernels.experts import triton as experts_triton

        given = rows_SD, groups.slot_KT, groups.kept_KT
        return experts_triton.sum_of_slots(*given, plus_TD=plus_TD, dtype=dtype or torch.float32)
    if not len(groups.token_S):  # no token has a slot
        total_TD = wide(rows_SD.new_zeros(groups.slot_KT.shape[1], rows_SD.shape[1]))
        return _rounded(total_TD, plus_TD, dtype)
    total_TD = None
    for k, slot_T in enumerate(groups.slot_KT):
        part_TD = wide(rows_SD.index_select(0, slot_T))
        if groups.kept_KT is not None:
            part_TD.masked_fill_(~groups.kept_KT[k, :, None], 0.0)
        total_TD = part_TD if total_TD is None else total_TD.add_(part_TD)
        del part_TD  # before the next is made: they are the largest of a block
    assert total_TD is not None
    return _rounded(total_TD, plus_TD, dtype)


def _rounded(total_TD: Tensor, plus_TD: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    total_TD = total_TD if plus_TD is None else total_TD.add_(plus_TD)
    return total_TD if dtype is None else total_TD.to(dtype)


def weights_of_slots(weights_KT: Tensor, groups: Groups) -> Tensor:
    """Return the weight of each slot, `[S]`; 0 for padding, whatever dropped copies have."""
    slots, slot_KT = len(groups.token_S), groups.slot_KT
    if groups.backend == "triton" and not torch.compiler.is_compiling():
        from megacpp.kernels.experts import triton_rows

        return triton_rows.weights_of_slots(weights_KT, slot_KT, groups.token_S, groups.kept_KT)
    if groups.kept_KT is not None:
        slot_KT = torch.where(groups.kept_KT, slot_KT, slots)
    w_S = weights_KT.new_zeros(slots + 1)
    return w_S.scatter_(0, slot_KT.T.flatten(), weights_KT.T.flatten())[:-1]


def copies_of_slots(value_S: Tensor, groups: Groups) -> Tensor:
    """Return the value in the slot of each copy, `[T, K]`; 0 for a dropped one."""
    slot_TK = groups.slot_KT.T
    if not len(groups.token_S):
        return value_S.new_zeros(slot_TK.shape)
    value_TK = value_S.index_select(0, slot_TK.flatten()).view(slot_TK.shape)
    if groups.kept_KT is not None:
        value_TK.masked_fill_(~groups.kept_KT.T, 0.0)
    return value_TK


class _Sum(torch.autograd.Function):
    """Sum of rows; backward gathers, as all that is here: no atomics, so sums have one order."""

    @staticmethod
    def forward(
        ctx: Any, rows_SD: Tensor, plus_TD: Tensor | None, groups: Groups, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.groups, ctx.dtype = groups, rows_SD.dtype
        ctx.plus = None if plus_TD is None else plus_TD.dtype
        return sum_of_slots(rows_SD, groups, plus_TD, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plus = None if ctx.plus is None else grads[0].to(ctx.plus)
        return rows_of_slots(grads[0], ctx.groups, ctx.dtype), plus, None, None


class _Weigh(torch.autograd.Function):
    """Weights by slot and, in backward, gradients by copy; none for a copy without a slot."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return weights_of_slots(weights_TK.T, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return copies_of_slots(grads[0], ctx.groups), None
