"""Feed-forward of the routed experts, which saves gate and up and nothing else.

    x_RD ── rows_SD ── w1, w3 ── gate_SI, up_SI ── act(gate, up) weight ── w2 ── y_SD
    saved   recomputed           saved             recomputed                    not needed

The weight of a copy goes to its hidden units, in fp32 and before they are rounded, not to its
output: sum_k w2 (weight_k h_k) is sum_k weight_k (w2 h_k), and then no output is needed for the
gradient of the weight, which is <dL / d(weight_k h_k), h_k>. `x_RD` is whatever the rows are copies
of: tokens, or rows that arrived from other ranks.

Legend: R rows that the slots hold copies of, S slots (rows in expert order), D model, I hidden of
an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.experts.grouped_mm import Counts, autocast, outer_products, products
from megacpp.kernels.experts.rows import Groups, rows_of_slots, sum_of_slots, weigh_slots
from megacpp.kernels.experts.sizes import block_rows
from megacpp.torch_extras import needs_input_grad_now, once_differentiable, wide

if TYPE_CHECKING:
    from megacpp.kernels.experts.fp8 import Fp8Products


def into_experts(
    x_RD: Tensor, groups: Groups, *weights_EID: Tensor, fp8: Fp8Products | None = None
) -> tuple[Tensor, ...]:
    """Return for each weight the product of every slot's row with its expert's matrix, `[S, I]`.

    The last result is `x_RD`, in the products' dtype: backward adds its gradient to that of the
    copies in one pass.
    """
    x_RD, *weights = autocast(x_RD, *weights_EID)
    return _Into.apply(x_RD, *weights, groups, fp8)  # type: ignore[return-value]


def out_of_experts(
    hidden: tuple[Tensor, ...],
    w2_EDI: Tensor,
    weights_RK: Tensor | None,
    groups: Groups,
    fp8: Fp8Products | None = None,
) -> Tensor:
    """Return w2 (weight * act) `[S, D]`: act = silu(gate) * up of two, relu(h)^2 of one.

    Args:
        hidden: gate and up `[S, I]`, or h alone.
        w2_EDI: matrices of the experts.
        weights_RK: of the copies, in fp32 (or fp64); None: 1.
        groups: slots.
        fp8: settings of FP8 products; None: off.
    """
    (w2_EDI,) = autocast(w2_EDI)
    weight = () if weights_RK is None else (weights_RK,)
    if weights_RK is not None and groups.backend != "triton":  # whose kernels look them up
        weight = (weigh_slots(weights_RK, groups),)
    return _OutOf.apply(w2_EDI, *hidden, *weight, len(hidden), groups, fp8)  # type: ignore[return-value]


class _Into(torch.autograd.Function):
    """Product of rows copied to slots; backward copies them again instead of saving them."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *weights, groups, fp8 = rest
        ctx.save_for_backward(x_RD, *weights)
        ctx.groups, ctx.fp8 = groups, fp8
        rows_SD = rows_of_slots(x_RD, groups, x_RD.dtype)
        ctx.set_materialize_grads(False)
        into = _rows_times(rows_SD, [w_EID.mT for w_EID in weights], groups.counts_E, fp8)
        return *into, x_RD.detach()  # no view, of which FSDP warns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        *grads, beside_RD = given
        x_RD, *weights = ctx.saved_tensors
        if grads[0] is None:  # nothing learns from the products
            return beside_RD, *[None] * (len(weights) + 2)
        groups, counts_E, fp8 = ctx.groups, ctx.groups.counts_E, ctx.fp8
        wants_x, *wants_w = needs_input_grad_now(ctx)[:-2]
        found: list[Tensor | None] = [None] * (1 + len(weights))
        if any(wants_w):
            rows_SD = rows_of_slots(x_RD, groups, x_RD.dtype)
            for i, grad_SI in enumerate(grads):
                if wants_w[i]:
                    found[1 + i] = _outer_sums(grad_SI, rows_SD, counts_E, len(weights[i]), fp8)
            del rows_SD
        if wants_x:
            (grad_SD,) = _rows_times(grads[0], [weights[0]], counts_E, fp8)
            for grad_SI, w_EID in zip(grads[1:], weights[1:], strict=True):
                grad_SD += _rows_times(grad_SI, [w_EID], counts_E, fp8)[0]
            found[0] = sum_of_slots(grad_SD, groups, beside_RD, x_RD.dtype)
        return *found, None, None


class _OutOf(torch.autograd.Function):
    """Second product, which saves gate and up; backward computes the hidden units again."""

    @staticmethod
    def forward(ctx: Any, w2_EDI: Tensor, *rest: Any) -> Tensor:
        *units, num_hidden, groups, fp8 = rest  # tensors first: `needs_input_grad_now`
        ctx.save_for_backward(w2_EDI, *units)
        ctx.num_hidden, ctx.groups, ctx.fp8 = num_hidden, groups, fp8
        h_SI = _weighed(_Units.unpack(units, num_hidden), groups)
        return _rows_times(h_SI, [w2_EDI.mT], groups.counts_E, fp8)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        w2_EDI, *tensors = ctx.saved_tensors
        units, grad_SD = _Units.unpack(tensors, ctx.num_hidden), grads[0]
        groups, counts_E = ctx.groups, ctx.groups.counts_E
        wants_w2, *wants_units = needs_input_grad_now(ctx)[: 1 + len(tensors)]
        h_SI, grad_w2 = None, None
        grad_units: list[Tensor | None] = [None] * len(tensors)
        if any(wants_units):
            (grad_SI,) = _rows_times(grad_SD, [w2_EDI], counts_E, ctx.fp8)
            grad_units[:], h_SI = _backward(units, grad_SI, wants_w2, groups)
            del grad_SI
        if wants_w2:
            h_SI = _weighed(units, groups) if h_SI is None else h_SI
            grad_w2 = _outer_sums(grad_SD, h_SI, counts_E, len(w2_EDI), ctx.fp8)
        return grad_w2, *grad_units, None, None, None


class _Units(NamedTuple):
    """Tensors from which hidden units are computed; without `up` they are relu(gate)^2.

    `weight` is that of each slot, `[S]`, and of each copy, `[R, K]`, for Triton's kernels.
    """

    gate_SI: Tensor
    up_SI: Tensor | None
    weight: Tensor | None

    @staticmethod
    def unpack(tensors: Sequence[Tensor], num_hidden: int) -> _Units:
        hidden, weight = tensors[:num_hidden], tensors[num_hidden:]
        return _Units(hidden[0], hidden[1] if num_hidden == 2 else None, *weight or (None,))

    def blocks(self) -> Iterator[tuple[slice, _Units]]:
        """Yield some rows at a time, in at least fp32."""
        slots, width = self.gate_SI.shape
        each = block_rows(slots, width)
        if torch.compiler.is_compiling():  # it fuses what the blocks are for
            each = max(slots, 1)
        for start in range(0, slots, each):
            rows = slice(start, start + each)
            gate, up, weight = (None if x is None else x[rows] for x in self)
            assert gate is not None
            up = None if up is None else wide(up)
            yield rows, _Units(wide(gate), up, None if weight is None else weight[:, None])


def _weighed(units: _Units, groups: Groups) -> Tensor:
    """Return weight * act `[S, I]`, rounded once."""
    if groups.backend == "triton":
        from megacpp.kernels.experts import triton_units

        return triton_units.weighed_units(*units, groups)
    h_SI = torch.empty_like(units.gate_SI)
    for rows, (gate, up, weight) in units.blocks():
        act = F.relu(gate).square_() if up is None else F.silu(gate).mul_(up)
        _round(act, weight, h_SI[rows])
    return h_SI


def _backward(
    units: _Units, grad_SI: Tensor, wants_h: bool, groups: Groups
) -> tuple[list[Tensor], Tensor | None]:
    """Return the gradients of `units`, from that of the hidden units, which is overwritten.

    On the way the hidden units themselves, if they are wanted.
    """
    if groups.backend == "triton":
        from megacpp.kernels.experts import triton_units

        return triton_units.units_backward(*units, groups, grad_SI, wants_h)
    h_SI = torch.empty_like(grad_SI) if wants_h else None
    swiglu = units.up_SI is not None
    grad_gate_SI = torch.empty_like(grad_SI) if swiglu else grad_SI
    grad_weight_S = None if units.weight is None else torch.empty_like(units.weight)
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
    return grads if grad_weight_S is None else [*grads, grad_weight_S], h_SI


def _round(act: Tensor, weight: Tensor | None, out: Tensor) -> None:
    if weight is None:
        out.copy_(act)
    else:
        torch.mul(act, weight, out=out)


def _rows_times(
    x_SD: Tensor, weights_EDF: Sequence[Tensor], counts_E: Counts, fp8: Fp8Products | None
) -> list[Tensor]:
    """Return `[S, F]` for each weight: each row times the matrix of its expert; no gradient."""
    if fp8 is None:
        return [products(x_SD, w_EDF, counts_E) for w_EDF in weights_EDF]
    from megacpp.kernels.experts.fp8 import rows_times

    return rows_times(x_SD, weights_EDF, counts_E, fp8)


def _outer_sums(
    left_SF: Tensor, right_SD: Tensor, counts_E: Counts, experts: int, fp8: Fp8Products | None
) -> Tensor:
    """Return of each expert the sum over its slots of left times right, `[E, F, D]`."""
    if fp8 is None or fp8.wide_gradients:
        return outer_products(left_SF, right_SD, counts_E, experts)
    from megacpp.kernels.experts.fp8 import outer_sums

    return outer_sums(left_SF, right_SD, counts_E, experts, fp8)
