"""The routed experts' feed-forward, of which gate and up are kept and nothing else.

    x_RD ── rows_SD ── w1, w3 ── gate_SI, up_SI ── act(gate, up) weight ── w2 ── y_SD
    kept    again                kept              again                         nobody's

The weight of a copy goes to its hidden units, in fp32 and before they are rounded, not to its
output: sum_k w2 (weight_k h_k) is sum_k weight_k (w2 h_k), and then no output is needed for the
gradient of the weight, which is <dL / d(weight_k h_k), h_k>. `x_RD` is whatever the rows are copies
of: tokens, or rows that arrived from other ranks.

Legend: R rows that the slots hold copies of, S slots (rows in expert order), D model, I hidden of
an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacpp.kernels.expert_rows import Groups, sum_of_slots
from megacpp.kernels.grouped_mm import CPU_ROWS, Counts, autocast, outer_products, products
from megacpp.kernels.wanted import wanted_gradients
from megacpp.model.fp32 import wide

# Elements between products are worked on in blocks of rows: at most so many, none smaller than so
# many elements (which a core's cache holds), for what is wide and temporary to stay small.
BLOCKS, BLOCK_ELEMENTS = 16, 2**16


def into_experts(x_RD: Tensor, groups: Groups, *weights_EID: Tensor) -> tuple[Tensor, ...]:
    """For each weight the product of every slot's row with its expert's matrix, `[S, I]`."""
    x_RD, *weights = autocast(x_RD, *weights_EID)
    return _Into.apply(x_RD, *weights, groups)  # type: ignore[return-value]


def out_of_experts(
    hidden: tuple[Tensor, ...], w2_EDI: Tensor, weight_S: Tensor | None, counts_E: Counts
) -> Tensor:
    """`[S, D]`: w2 (weight * act), act = silu(gate) * up of two, relu(h)^2 of one.

    `weight_S` is in fp32 (or fp64) and 1 if None; counts as `grouped_linear` wants them.
    """
    (w2_EDI,) = autocast(w2_EDI)
    weight = () if weight_S is None else (weight_S,)
    return _OutOf.apply(w2_EDI, *hidden, *weight, len(hidden), counts_E)  # type: ignore[return-value]


class _Into(torch.autograd.Function):
    """Copies rows to slots and multiplies; backward copies them again instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        weights, groups = rest[:-1], rest[-1]
        ctx.save_for_backward(x_RD, *weights)
        ctx.groups = groups
        rows_SD = x_RD.index_select(0, groups.token_S)
        return tuple(products(rows_SD, w_EID.mT, groups.counts_E) for w_EID in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, *weights = ctx.saved_tensors
        groups, counts_E = ctx.groups, ctx.groups.counts_E
        wants_x, *wants_w = wanted_gradients(ctx)[:-1]
        found: list[Tensor | None] = [None] * (1 + len(weights))
        if any(wants_w):
            rows_SD = x_RD.index_select(0, groups.token_S)
            for i, grad_SI in enumerate(grads):
                if wants_w[i]:
                    found[1 + i] = outer_products(grad_SI, rows_SD, counts_E, len(weights[i]))
            del rows_SD
        if wants_x:
            grad_SD = products(grads[0], weights[0], counts_E)
            for grad_SI, w_EID in zip(grads[1:], weights[1:], strict=True):
                grad_SD += products(grad_SI, w_EID, counts_E)
            found[0] = sum_of_slots(grad_SD, groups).to(x_RD.dtype)
        return *found, None


class _OutOf(torch.autograd.Function):
    """Keeps gate and up; their product is made again for the gradient of w2."""

    @staticmethod
    def forward(ctx: Any, w2_EDI: Tensor, *rest: Any) -> Tensor:
        *units, num_hidden, counts_E = rest  # tensors first: `wanted_gradients`
        ctx.save_for_backward(w2_EDI, *units)
        ctx.num_hidden, ctx.counts = num_hidden, counts_E
        h_SI = _weighed(_Units.of(units, num_hidden))
        return products(h_SI, w2_EDI.mT, counts_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        w2_EDI, *tensors = ctx.saved_tensors
        units, grad_SD, counts_E = _Units.of(tensors, ctx.num_hidden), grads[0], ctx.counts
        wants_w2, *wants_units = wanted_gradients(ctx)[: 1 + len(tensors)]
        h_SI, grad_w2 = None, None
        grad_units: list[Tensor | None] = [None] * len(tensors)
        if any(wants_units):
            grad_SI = products(grad_SD, w2_EDI, counts_E)
            h_SI = torch.empty_like(grad_SI) if wants_w2 else None
            grad_units[:] = _backward(units, grad_SI, h_SI)
            del grad_SI
        if wants_w2:
            h_SI = _weighed(units) if h_SI is None else h_SI
            grad_w2 = outer_products(grad_SD, h_SI, counts_E, len(w2_EDI))
        return grad_w2, *grad_units, None, None


class _Units(NamedTuple):
    """What the hidden units are made of; without `up` they are relu(gate)^2."""

    gate_SI: Tensor
    up_SI: Tensor | None
    weight_S: Tensor | None

    @staticmethod
    def of(tensors: Sequence[Tensor], num_hidden: int) -> _Units:
        hidden, weight = tensors[:num_hidden], tensors[num_hidden:]
        return _Units(hidden[0], hidden[1] if num_hidden == 2 else None, *weight or (None,))

    def blocks(self) -> Iterator[tuple[slice, _Units]]:
        """Some rows at a time, in at least fp32; see `BLOCKS`."""
        slots, width = self.gate_SI.shape
        each = max(-(-slots // BLOCKS), BLOCK_ELEMENTS // max(1, width), 1)
        each = -(-each // CPU_ROWS) * CPU_ROWS
        if torch.compiler.is_compiling():  # it fuses what the blocks are for
            each = max(slots, 1)
        for start in range(0, slots, each):
            rows = slice(start, start + each)
            gate, up, weight = (None if x is None else x[rows] for x in self)
            assert gate is not None
            up = None if up is None else wide(up)
            yield rows, _Units(wide(gate), up, None if weight is None else weight[:, None])


def _weighed(units: _Units) -> Tensor:
    """`[S, I]`: weight * act, rounded once."""
    h_SI = torch.empty_like(units.gate_SI)
    for rows, (gate, up, weight) in units.blocks():
        act = F.relu(gate).square_() if up is None else F.silu(gate).mul_(up)
        _round(act, weight, h_SI[rows])
    return h_SI


def _backward(units: _Units, grad_SI: Tensor, h_SI: Tensor | None) -> list[Tensor]:
    """Gradients of all that `units` has, from that of the hidden units, whose place one takes.

    Writes the hidden units themselves to `h_SI` on the way.
    """
    swiglu = units.up_SI is not None
    grad_gate_SI = torch.empty_like(grad_SI) if swiglu else grad_SI
    grad_weight_S = None if units.weight_S is None else torch.empty_like(units.weight_S)
    for rows, (gate, up, weight) in units.blocks():
        part = F.relu(gate) if up is None else F.silu(gate)
        act, grad = part * (part if up is None else up), wide(grad_SI[rows])
        if weight is not None and grad_weight_S is not None:
            torch.sum(grad * act, 1, out=grad_weight_S[rows])
            grad = grad.mul_(weight)
        if h_SI is not None:
            _round(act, weight, h_SI[rows])
        if up is None:
            torch.mul(grad.mul_(2.0), part, out=grad_SI[rows])
        else:
            grad_gate_SI[rows] = torch.ops.aten.silu_backward(torch.mul(grad, up, out=act), gate)
            torch.mul(part, grad, out=grad_SI[rows])
    grads = [grad_gate_SI, grad_SI] if swiglu else [grad_gate_SI]
    return grads if grad_weight_S is None else [*grads, grad_weight_S]


def _round(act: Tensor, weight: Tensor | None, out: Tensor) -> None:
    if weight is None:
        out.copy_(act)
    else:
        torch.mul(act, weight, out=out)
