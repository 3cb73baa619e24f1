"""Triton kernels between the products of the experts: rows to slots and back, and hidden units.

    spread      row of every slot = its token's, in the dtype asked for; of a gradient also weighed,
                with the dot product that is the gradient of the weight
    sum         a token's rows added up, weighed or not, in fp32, and rounded once
    units       weight * silu(gate) * up, rounded once
    d units     gradients of gate, up and weight, and the units again for the gradient of w2

One launch each and one pass over memory; nothing wide is written. All of them gather: every result
has one writer, and sums have one order, that of the torch form. Numbers inside are fp32.

Legend: R rows that the slots hold copies of, S slots (rows in expert order), T tokens, K experts
of a token, D model, I hidden of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def weighed_units(gate_SI: Tensor, up_SI: Tensor | None, weight_S: Tensor | None) -> Tensor:
    """Return weight * silu(gate) * up `[S, I]`, or weight * relu(gate)^2 without `up`."""
    return _units(gate_SI, up_SI, weight_S)


def units_backward(
    gate_SI: Tensor,
    up_SI: Tensor | None,
    weight_S: Tensor | None,
    grad_SI: Tensor,
    wants_units: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Return the gradients of all given tensors, and the weighed units again if they are wanted.

    The gradient of `up` (of `gate` without one) takes the place of `grad_SI`.

    Args:
        gate_SI: gate.
        up_SI: up; None: units are relu(gate)^2.
        weight_S: weight of each slot; None: 1.
        grad_SI: gradient of the weighed units; overwritten.
        wants_units: compute the weighed units again.
    """
    other, weight, units = _units_backward(gate_SI, up_SI, weight_S, grad_SI, wants_units)
    grads = [grad_SI] if up_SI is None else [other, grad_SI]
    return grads + ([] if weight_S is None else [weight]), units if wants_units else None


def _launch(kernel: Any, grid: tuple[Any, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernel[grid](x, *args, **constants)


# Operators of their own: tensors without values pass, and a compiler need not look inside.
@torch.library.custom_op("megacpp::experts_spread", mutates_args=())
def _spread(x_RD: Tensor, token_S: Tensor, dtype: torch.dtype) -> Tensor:
    x_RD, out_SD = x_RD.contiguous(), x_RD.new_empty(len(token_S), x_RD.shape[1], dtype=dtype)
    if out_SD.numel():
        grid = (len(token_S), triton.cdiv(x_RD.shape[1], BLOCK))
        _launch(_spread_kernel, grid, x_RD, token_S, out_SD, x_RD.shape[1], BLOCK=BLOCK)
    return out_SD


@torch.library.custom_op("megacpp::experts_spread_weighed", mutates_args=())
def _spread_weighed(
    x_RD: Tensor, token_S: Tensor, weight_S: Tensor, rows_SD: Tensor
) -> tuple[Tensor, Tensor]:
    x_RD, rows_SD = x_RD.contiguous(), rows_SD.contiguous()
    out_SD, dot_S = torch.empty_like(rows_SD), weight_S.new_empty(len(token_S))
    if len(token_S):
        given = x_RD, token_S, weight_S.contiguous(), rows_SD, out_SD, dot_S
        _launch(_spread_weighed_kernel, (len(token_S),), *given, D=x_RD.shape[1], BLOCK=BLOCK)
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
    if out_TD.numel():
        kept = slot_TK if kept_KT is None else kept_KT.T.contiguous()
        weights = slot_TK if weights_KT is None else weights_KT.T.contiguous()
        plus = out_TD if plus_TD is None else plus_TD.contiguous()
        _launch(
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


@torch.library.custom_op("megacpp::experts_units", mutates_args=())
def _units(gate_SI: Tensor, up_SI: Tensor | None, weight_S: Tensor | None) -> Tensor:
    gate_SI, (S, hidden) = gate_SI.contiguous(), gate_SI.shape
    out_SI = torch.empty_like(gate_SI)
    if out_SI.numel():
        up = gate_SI if up_SI is None else up_SI.contiguous()
        weight = gate_SI if weight_S is None else weight_S.contiguous()
        _launch(
            _units_kernel,
            (S, triton.cdiv(hidden, BLOCK)),
            *(gate_SI, up, weight, out_SI, hidden),
            GATED=up_SI is not None,
            WEIGHED=weight_S is not None,
            BLOCK=BLOCK,
        )
    return out_SI


@torch.library.custom_op("megacpp::experts_units_backward", mutates_args=("grad_SI",))
def _units_backward(
    gate_SI: Tensor,
    up_SI: Tensor | None,
    weight_S: Tensor | None,
    grad_SI: Tensor,
    wants_units: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    assert grad_SI.is_contiguous(), "written in place"
    gate_SI, (S, hidden) = gate_SI.contiguous(), gate_SI.shape
    other_SI, dweight_S, units_SI = _of_backward(gate_SI, up_SI, weight_S, wants_units)
    if gate_SI.numel():
        up = gate_SI if up_SI is None else up_SI.contiguous()
        weight = gate_SI if weight_S is None else weight_S.contiguous()
        _launch(
            _units_backward_kernel,
            (S,),
            *(gate_SI, up, weight, grad_SI, other_SI, dweight_S, units_SI),
            hidden=hidden,
            GATED=up_SI is not None,
            WEIGHED=weight_S is not None,
            UNITS=wants_units,
            BLOCK=BLOCK,
        )
    return other_SI, dweight_S, units_SI


def _of_backward(
    gate_SI: Tensor, up_SI: Tensor | None, weight_S: Tensor | None, wants_units: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the gradients of gate and weight, and for the units, if wanted."""
    none = gate_SI.new_empty(0)
    other_SI = torch.empty_like(gate_SI) if up_SI is not None else none
    dweight_S = gate_SI.new_empty(0) if weight_S is None else torch.empty_like(weight_S)
    return other_SI, dweight_S, torch.empty_like(gate_SI) if wants_units else none.clone()


@_spread.register_fake
def _(x_RD: Tensor, token_S: Tensor, dtype: torch.dtype) -> Tensor:
    return x_RD.new_empty(len(token_S), x_RD.shape[1], dtype=dtype)


@_spread_weighed.register_fake
def _(x_RD: Tensor, token_S: Tensor, weight_S: Tensor, rows_SD: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_SD), weight_S.new_empty(len(token_S))


@_sum_of_slots.register_fake
def _(rows_SD: Tensor, slot_KT: Tensor, *rest: Any) -> Tensor:
    return rows_SD.new_empty(slot_KT.shape[1], rows_SD.shape[1], dtype=rest[-1])


@_units.register_fake
def _(gate_SI: Tensor, *_: Tensor | None) -> Tensor:
    return torch.empty_like(gate_SI)


@_units_backward.register_fake
def _(
    gate_SI: Tensor,
    up_SI: Tensor | None,
    weight_S: Tensor | None,
    grad_SI: Tensor,
    wants_units: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _of_backward(gate_SI, up_SI, weight_S, wants_units)


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
    rows,
    slots,
    kept,
    weights,
    plus,
    out,
    D,
    K: tl.constexpr,
    SOME: tl.constexpr,
    WEIGHED: tl.constexpr,
    PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


@triton.jit
def _units_kernel(
    gate, up, weight, out, hidden, GATED: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < hidden, slot * hidden + column
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        act = g / (1.0 + tl.exp(-g)) * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    else:
        part = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        act = part * part
    if WEIGHED:
        act = act * tl.load(weight + slot).to(tl.float32)
    tl.store(out + place, act.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _units_backward_kernel(
    gate,
    up,
    weight,
    grad,
    other,
    dweight,
    units,
    hidden: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHED: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if WEIGHED:
        factor = tl.load(weight + slot).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, place = column < hidden, slot * hidden + column
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-g))
            part = g * sigmoid
            act = part * u
            total += d * act
            d = d * factor
            dgate = d * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
            tl.store(other + place, dgate.to(other.dtype.element_ty), mask=inside)
            tl.store(grad + place, (d * part).to(grad.dtype.element_ty), mask=inside)
        else:
            part = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
            act = part * part
            total += d * act
            d = 2.0 * d * factor * part
            tl.store(grad + place, d.to(grad.dtype.element_ty), mask=inside)
        if UNITS:
            tl.store(units + place, (act * factor).to(units.dtype.element_ty), mask=inside)
    if WEIGHED:
        tl.store(dweight + slot, tl.sum(total, 0).to(dweight.dtype.element_ty))
