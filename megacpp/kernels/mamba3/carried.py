"""Addition of a state in front of a row to the outputs, and the state behind it: without a scan.

For kernels that take no initial state, or whose final state can't be trusted. Angles and log decays
are counted from the start of the row; only the document that continues from the row's state, its
first one, reads it, and only the last one leaves a state behind:

    y[t] += e^(sum of adt up to t) (S + beta v k^T) q[t]        beta = dt (1 - lambda) of token 0

Legend: as megacpp/kernels/mamba3/inputs.py. Inside, the N axis is ordered so that pair i is rows i
and i + N/2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.ops import check_contract, from_halves, to_halves
from megacpp.kernels.mamba3.segments import fold, per_head, summarize, turned
from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable, wide


def carried_outputs(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    initial: Mamba3State,
) -> Tensor:
    """Return the outputs of all ranks from `initial` alone, `[B, T, H, R, P]`, at least fp32.

    Saves only its inputs for backward, which are the scan's too, and rotates Q again there. The
    product takes its operands in the dtype of V, as the scan's products do.

    Args:
        inputs: of every token.
        weights: of the heads.
        docs: documents.
        pairing: of the rotated dims.
        initial: state in front of each row.
    """
    check_contract(inputs, weights)
    first_BT = docs.memo("first run", lambda: _first_run(docs))
    with torch.autocast(inputs.V.device.type, enabled=False):
        beta_BH = inputs.DT[..., 0] * torch.sigmoid(-wide(inputs.Trap[..., 0]))
        halo_BHPN = weights.ranks_of_token(initial.v).mT @ wide(initial.k)
        state_BHPN = to_halves(initial.ssm + beta_BH[..., None, None] * halo_BHPN, pairing)
        return _Carried.apply(  # type: ignore[return-value]
            pairing,
            inputs.V.dtype,
            first_BT,
            inputs.Q,
            inputs.ADT,
            inputs.DT,
            inputs.Angles,
            weights.Q_bias,
            initial.angle,
            state_BHPN,
        )


def final_state(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    initial: Mamba3State | None = None,
) -> Mamba3State:
    """Return the state after each row, as the scan would leave it, with gradients, at least fp32.

    Args:
        inputs: of every token.
        weights: of the heads.
        docs: documents.
        pairing: of the rotated dims.
        initial: state in front of each row; None: zeros.
    """
    row = summarize(inputs, weights, docs, pairing)
    carries_B = docs.memo("first run", lambda: _first_run(docs))[:, -1]
    entering, angle_BHA = None, row.turn
    if initial is not None:
        before_BHA = -initial.angle  # to the frame of the row
        entering = replace(
            initial,
            ssm=_turned(initial.ssm, before_BHA, pairing),
            k=_turned(initial.k, before_BHA, pairing),
        )
        angle_BHA = row.turn + torch.where(carries_B[:, None, None], initial.angle, 0.0)
    after = fold([row], carries_B[None], weights, pairing, entering)[-1]
    return Mamba3State(
        torch.remainder(angle_BHA, 2 * math.pi),
        _turned(after.ssm, angle_BHA, pairing),
        _turned(after.k, angle_BHA, pairing),
        inputs.V[:, -1],
    )


class _Carried(torch.autograd.Function):
    """Autograd function of `_carried` that saves its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, pairing: Pairing, dtype: torch.dtype, first_BT: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.pairing, ctx.dtype = pairing, dtype
        ctx.save_for_backward(first_BT, *inputs)
        return _carried(pairing, dtype, first_BT, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first_BT, *inputs = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
            output = _carried(ctx.pairing, ctx.dtype, first_BT, *leaves)
        return None, None, None, *torch.autograd.grad(output, leaves, grads)


def _carried(
    pairing: Pairing,
    dtype: torch.dtype,
    first_BT: Tensor,
    Q: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Angles: Tensor,
    Q_bias: Tensor,
    angle_BHA: Tensor,
    state_BHPN: Tensor,
) -> Tensor:
    decay_BHT = torch.where(first_BT[:, None], ADT.double().cumsum(-1), float("-inf")).exp()
    turn_BHTA = (math.pi * torch.tanh(wide(Angles))).transpose(1, 2) * DT[..., None]
    # In fp64: of thousands of radians only the remainder matters.
    angle_BHTA = angle_BHA[:, :, None] + turn_BHTA.double().cumsum(2)
    angle_BHTA = torch.remainder(angle_BHTA, 2 * math.pi).to(DT.dtype)
    q_BGTRN = to_halves(wide(Q), pairing).permute(0, 3, 1, 2, 4)
    q_BHTRN = per_head(q_BGTRN, to_halves(Q_bias, pairing)[:, None])
    q_BHTRN = turned(q_BHTRN, angle_BHTA[:, :, :, None]).to(dtype)
    y_BHTRP = wide(torch.einsum("bhtrn,bhpn->bhtrp", q_BHTRN, state_BHPN.to(dtype)))
    return (y_BHTRP * decay_BHT.to(DT.dtype)[..., None, None]).transpose(1, 2)


def _first_run(docs: Documents) -> Tensor:
    """Return bool `[B, T]`: the token's document is the row's first one."""
    changes_BT = docs.ids_BT[:, 1:] != docs.ids_BT[:, :-1]
    return torch.nn.functional.pad(changes_BT.cumsum(1), (1, 0)) == 0


def _turned(x_BHXN: Tensor, angle_BHA: Tensor, pairing: Pairing) -> Tensor:
    """Return x with its N axis rotated, in its own order."""
    return from_halves(turned(to_halves(x_BHXN, pairing), angle_BHA[:, :, None]), pairing)
