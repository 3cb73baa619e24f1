"""Triton kernels between the products of the experts: rows to slots and back.

    spread      row of every slot = its token's, in the dtype asked for; of a gradient also weighed,
                with the dot product that is the gradient of the weight
    sum         a token's rows added up, weighed or not, in fp32, and rounded once

One launch each and one pass over memory; nothing wide is written. All of them gather: every result
has one writer, and sums have one order, that of the torch form. Numbers inside are fp32.

Legend: R rows that the slots hold copies of, S slots (rows in expert order), T tokens, K experts
of a token, D model.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.strides import launch

BLOCK = 1024  # numbers of a row at a time: 8 for each thread of 4 warps


def spread(x_RD: Tensor, token_S: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the row of every slot, `[S, D]`, rounded to `dtype`."""
    return _spread(x_RD, token_S, dtype)


def spread_weighed(
    x_RD: Tensor, token_S: Tensor, weight_S: Tensor, rows_SD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rows times the weight of their slot `[S, D]`, and row . `rows_SD` of each slot `[S]`.

    Args:
        x_RD: rows.
        token_S: row in each slot.
        weight_S: weight of each slot.
        rows_SD: other factor of the products; its dtype is that of the first result.
    """
    return _spread_weighed(x_RD, token_S, weight_S, rows_SD)


def sum_of_slots(
    rows_SD: Tensor,
    slot_KT: Tensor,
    kept_KT: Tensor | None,
    weights_KT: Tensor | None = None,
    plus_TD: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the sum of each token's slots, `[T, D]`, added up in fp32.

    Args:
        rows_SD: rows in the slots.
        slot_KT: slot of each copy.
        kept_KT: bool, copies that have a slot; None: all.
        weights_KT: weight of each copy; None: 1.
        plus_TD: added to the sums; None: 0.
        dtype: of the result.
    """
    return _sum_of_slots(rows_SD, slot_KT, kept_KT, weights_KT, plus_TD, dtype)


# Operators of their own: tensors without values pass, and a compiler need not look inside.
@torch.library.custom_op("megacpp::experts_spread", mutates_args=())
def _spread(x_RD: Tensor, token_S: Tensor, dtype: torch.dtype) -> Tensor:
    x_RD, out_SD = x_RD.contiguous(), x_RD.new_empty(len(token_S), x_RD.shape[1], dtype=dtype)
    grid = len(token_S), triton.cdiv(x_RD.shape[1], BLOCK)
    launch(_spread_kernel, grid, x_RD, token_S, out_SD, x_RD.shape[1], BLOCK=BLOCK)
    return out_SD


@torch.library.custom_op("megacpp::experts_spread_weighed", mutates_args=())
def _spread_weighed(
    x_RD: Tensor, token_S: Tensor, weight_S: Tensor, rows_SD: Tensor
) -> tuple[Tensor, Tensor]:
    x_RD, rows_SD = x_RD.contiguous(), rows_SD.contiguous()
    out_SD, dot_S = torch.empty_like(rows_SD), weight_S.new_empty(len(token_S))
    given = x_RD, token_S, weight_S.contiguous(), rows_SD, out_SD, dot_S
    launch(_spread_weighed_kernel, (len(token_S),), *given, D=x_RD.shape[1], BLOCK=BLOCK)
    return out_SD, dot_S


@torch.library.custom_op("megacpp::experts_sum", mutates_args=())
def _sum_of_slots(
    rows_SD: Tensor,
    slot_KT: Tensor,
    kept_KT: Tensor | None,
    weights_KT: Tensor | None,
    plus_TD: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    rows_SD, slot_TK = rows_SD.contiguous(), slot_KT.T.contiguous()
    (T, K), D = slot_TK.shape, rows_SD.shape[1]
    out_TD = rows_SD.new_empty(T, D, dtype=dtype)
    if not len(rows_SD):
        return out_TD.zero_() if plus_TD is None else out_TD.copy_(plus_TD)
    kept = slot_TK if kept_KT is None else kept_KT.T.contiguous()
    weights = slot_TK if weights_KT is None else weights_KT.T.contiguous()
    plus = out_TD if plus_TD is None else plus_TD.contiguous()
    launch(
        _sum_kernel,
        (T, triton.cdiv(D, BLOCK)),
        *(rows_SD, slot_TK, kept, weights, plus, out_TD, D),
        K=K,
        SOME=kept_KT is not None,
        WEIGHED=weights_KT is not None,
        PLUS=plus_TD is not None,
        BLOCK=BLOCK,
    )
    return out_TD


@_spread.register_fake
def _(x_RD: Tensor, token_S: Tensor, dtype: torch.dtype) -> Tensor:
    return x_RD.new_empty(len(token_S), x_RD.shape[1], dtype=dtype)


@_spread_weighed.register_fake
def _(x_RD: Tensor, token_S: Tensor, weight_S: Tensor, rows_SD: Tensor) -> tuple[Tensor, Tensor]:
    return rows_SD.new_empty(rows_SD.shape), weight_S.new_empty(len(token_S))


@_sum_of_slots.register_fake
def _(rows_SD: Tensor, slot_KT: Tensor, *rest: Any) -> Tensor:
    return rows_SD.new_empty(slot_KT.shape[1], rows_SD.shape[1], dtype=rest[-1])


@triton.jit
def _spread_kernel(x, token, out, D, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    row = tl.load(token + slot)
    values = tl.load(x + row * D + column, mask=inside)
    tl.store(out + slot * D + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _spread_weighed_kernel(x, token, weight, rows, out, dot, D: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    row, factor = tl.load(token + slot), tl.load(weight + slot).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < D
        values = tl.load(x + row * D + column, mask=inside, other=0.0).to(tl.float32)
        total += values * tl.load(rows + slot * D + column, mask=inside, other=0.0).to(tl.float32)
        weighed = (values * factor).to(out.dtype.element_ty)
        tl.store(out + slot * D + column, weighed, mask=inside)
    tl.store(dot + slot, tl.sum(total, 0).to(dot.dtype.element_ty))


@triton.jit
def _sum_kernel(
    rows, slots, kept, weights, plus, out, D,
    K: tl.constexpr, SOME: tl.constexpr, WEIGHED: tl.constexpr, PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        copy = token * K + k
        slot, read = tl.load(slots + copy), inside
        if SOME:
            # A copy without a slot has the number 0: what lies there is another's, or no number.
            read = inside & (tl.load(kept + copy) != 0)
        values = tl.load(rows + slot * D + column, mask=read, other=0.0).to(tl.float32)
        if WEIGHED:
            values = values * tl.load(weights + copy).to(tl.float32)
        total += values
    if PLUS:
        total += tl.load(plus + token * D + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=inside)
