"""Triton kernels of the experts' hidden units, and of those of other gated layers.

    units       weight * silu(gate) * up, rounded once
    d units     gradients of gate, up and weight, and the units again for the gradient of w2

One launch each and one pass over memory. A slot's weight is looked up among those of its token's
copies, and the gradient of a weight is stored at its copy. Every result has one writer. Numbers
inside are fp32.

Legend: S slots (rows in expert order), T tokens, K experts of a token, I hidden of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.experts.rows import Groups
from megacpp.kernels.experts.triton import BLOCK
from megacpp.kernels.graph_operator import graph_operator
from megacpp.kernels.strides import launch

# Weights of copies, their slots, tokens of slots, and copies with a slot (`_slots_of`).
Copies = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def weighed_units(
    gate_SI: Tensor,
    up_SI: Tensor | None = None,
    weights_TK: Tensor | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """Return weight * silu(gate) * up `[S, I]`, or weight * relu(gate)^2 without `up`.

    Args:
        gate_SI: gate.
        up_SI: up; None: units are relu(gate)^2.
        weights_TK: weight of each copy; None: 1.
        groups: slots of these copies; a slot without one weighs 0.
    """
    return _units(gate_SI, up_SI, *_slots_of(weights_TK, groups))


def units_backward(
    gate_SI: Tensor,
    up_SI: Tensor | None,
    weights_TK: Tensor | None,
    groups: Groups | None,
    grad_SI: Tensor,
    wants_units: bool,
    other_SI: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Return the gradients of all given tensors, and the weighed units again if they are wanted.

    The gradient of `up` (of `gate` without one) takes the place of `grad_SI`, but for in a graph.

    Args:
        gate_SI: gate.
        up_SI: up; None: units are relu(gate)^2.
        weights_TK: weight of each copy; None: 1.
        groups: slots of these copies.
        grad_SI: gradient of the weighed units; overwritten.
        wants_units: compute the weighed units again.
        other_SI: memory for the gradient of `gate` beside one of `up`, its rows as far apart as
            those of `grad_SI`; None: new memory.
    """
    copies = _slots_of(weights_TK, groups)
    if torch.compiler.is_compiling():
        given = gate_SI, up_SI, *copies, grad_SI, wants_units
        *grads, weight, units = _new_gradients(*given)
    else:
        grads = [grad_SI]
        if up_SI is not None:
            grads.insert(0, torch.empty_like(grad_SI) if other_SI is None else other_SI)
        weight, units = _gradients(gate_SI, up_SI, *copies, grad_SI, wants_units, grads)
    return grads + ([] if weights_TK is None else [weight]), units if wants_units else None


def _slots_of(weights_TK: Tensor | None, groups: Groups | None) -> Copies:
    """Return weights of copies, their slots `[T, K]`, tokens of slots, and copies with a slot."""
    if weights_TK is None or groups is None:
        return None, None, None, None
    kept = None if groups.kept_KT is None else groups.kept_KT.T.contiguous()
    return weights_TK.contiguous(), groups.slot_KT.T.contiguous(), groups.token_S, kept


@graph_operator("experts_units")
def _units(
    gate_SI: Tensor,
    up_SI: Tensor | None,
    weights_TK: Tensor | None,
    slot_TK: Tensor | None,
    token_S: Tensor | None,
    kept_TK: Tensor | None,
) -> Tensor:
    (gate_SI, up), (S, hidden) = _as_far_apart(gate_SI, up_SI), gate_SI.shape
    out_SI = gate_SI.new_empty(gate_SI.shape)
    if out_SI.numel():
        copies = _given(gate_SI, weights_TK, slot_TK, token_S, kept_TK)
        launch(
            _units_kernel,
            (S, triton.cdiv(hidden, BLOCK)),
            *(gate_SI, up, *copies, out_SI, hidden, gate_SI.stride(0)),
            GATED=up_SI is not None,
            BLOCK=BLOCK,
            **_weighing(weights_TK, kept_TK),
        )
    return out_SI


@graph_operator("experts_units_backward")
def _new_gradients(
    gate_SI: Tensor,
    up_SI: Tensor | None,
    weights_TK: Tensor | None,
    slot_TK: Tensor | None,
    token_S: Tensor | None,
    kept_TK: Tensor | None,
    grad_SI: Tensor,
    wants_units: bool,
) -> list[Tensor]:
    """Return the gradients of gate and up, of the weights, and the units; empty: not wanted."""
    grad_SI, gated = grad_SI.contiguous(), up_SI is not None
    grads = [torch.empty_like(grad_SI) for _ in range(1 + gated)]
    copies = weights_TK, slot_TK, token_S, kept_TK
    return [*grads, *_gradients(gate_SI, up_SI, *copies, grad_SI, wants_units, grads)]


def _gradients(
    gate_SI: Tensor,
    up_SI: Tensor | None,
    weights_TK: Tensor | None,
    slot_TK: Tensor | None,
    token_S: Tensor | None,
    kept_TK: Tensor | None,
    grad_SI: Tensor,
    wants_units: bool,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Write the gradients of gate and up, whose strides are those of `grad_SI`.

    Return that of the weights, and the units; empty: not wanted.
    """
    assert all(x.stride() == grad_SI.stride() and x.stride(1) == 1 for x in grads), "one place"
    (gate_SI, up), (S, hidden) = _as_far_apart(gate_SI, up_SI), gate_SI.shape
    dweight_TK = gate_SI.new_empty(0) if weights_TK is None else torch.empty_like(weights_TK)
    units_SI = gate_SI.new_empty(gate_SI.shape if wants_units else 0)
    if kept_TK is not None or not len(gate_SI):  # copies without a slot
        dweight_TK.zero_()
    if gate_SI.numel():
        copies = _given(gate_SI, weights_TK, slot_TK, token_S, kept_TK)
        launch(
            _units_backward_kernel,
            (S,),
            *(gate_SI, up, *copies, grad_SI, grads[0], grads[-1], dweight_TK, units_SI),
            *(gate_SI.stride(0), grad_SI.stride(0)),
            hidden=hidden,
            GATED=up_SI is not None,
            UNITS=wants_units,
            BLOCK=BLOCK,
            **_weighing(weights_TK, kept_TK),
        )
    return dweight_TK, units_SI


def _as_far_apart(gate_SI: Tensor, up_SI: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate, and up or again gate, whose rows lie as far apart: halves of one tensor may."""
    up = gate_SI if up_SI is None else up_SI
    if gate_SI.stride() == up.stride() and up.stride(1) == 1:
        return gate_SI, up
    return gate_SI.contiguous(), up.contiguous()


def _given(gate_SI: Tensor, *given: Tensor | None) -> list[Tensor]:
    """Return tensors for a kernel; in place of those that it doesn't read, the gate."""
    return [gate_SI if x is None else x for x in given]


def _weighing(weights_TK: Tensor | None, kept_TK: Tensor | None) -> dict[str, Any]:
    top_k = 0 if weights_TK is None else weights_TK.shape[1]
    return {"K": top_k, "SOME": kept_TK is not None}


@triton.jit
def _copy_in(slot, slots, tokens, kept, K: tl.constexpr, SOME: tl.constexpr):
    """Return the number of the copy in a slot; -1 where there is none."""
    first = tl.load(tokens + slot) * K
    copy = first * 0 - 1
    for k in range(K):
        is_it = tl.load(slots + first + k) == slot
        if SOME:  # a copy without a slot has the number 0, which is another's
            is_it = is_it & (tl.load(kept + first + k) != 0)
        copy = tl.where(is_it, first + k, copy)
    return copy


@triton.jit
def _units_kernel(
    gate, up, weights, slots, tokens, kept, out, hidden, row_stride,
    GATED: tl.constexpr, K: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < hidden, slot * row_stride + column
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        act = g / (1.0 + tl.exp(-g)) * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    else:
        part = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        act = part * part
    if K:
        copy = _copy_in(slot, slots, tokens, kept, K, SOME)
        act = act * tl.load(weights + copy, mask=copy >= 0, other=0.0).to(tl.float32)
    tl.store(out + slot * hidden + column, act.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _units_backward_kernel(
    gate, up, weights, slots, tokens, kept, grad, dgates, last, dweights, units, row_stride, apart,
    hidden: tl.constexpr, GATED: tl.constexpr, UNITS: tl.constexpr, K: tl.constexpr,
    SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    factor, copy = 1.0, slot
    if K:
        copy = _copy_in(slot, slots, tokens, kept, K, SOME)
        factor = tl.load(weights + copy, mask=copy >= 0, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, of_grad = column < hidden, slot * apart + column
        place = slot * row_stride + column
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + of_grad, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-g))
            part = g * sigmoid
            act = part * u
            total += d * act
            d = d * factor
            dgate = d * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
            tl.store(dgates + of_grad, dgate.to(dgates.dtype.element_ty), mask=inside)
            tl.store(last + of_grad, (d * part).to(last.dtype.element_ty), mask=inside)
        else:
            part = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
            act = part * part
            total += d * act
            d = 2.0 * d * factor * part
            tl.store(last + of_grad, d.to(last.dtype.element_ty), mask=inside)
        if UNITS:
            place = slot * hidden + column
            tl.store(units + place, (act * factor).to(units.dtype.element_ty), mask=inside)
    if K:
        dweight = tl.sum(total, 0).to(dweights.dtype.element_ty)
        tl.store(dweights + copy, dweight, mask=copy >= 0)
