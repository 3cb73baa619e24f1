"""Mamba-3 scan (arXiv 2603.15569): one token, and token by token.

Per head, with lambda = sigmoid(trap), alpha = exp(adt), angle the running sum of pi tanh(a) dt:

    S[t] = alpha S[t-1] + alpha dt (1 - lambda) v[t-1] k[t-1]^T + dt lambda v[t] k[t]^T
    y[t] = S[t] q[t] + D v[t]        q, k = Rotate(angle)(Q + Q_bias), Rotate(angle)(K + K_bias)

With MIMO rank R, k, q and v have R vectors a token that share one S: outer products are summed,
and there are R outputs. All of it restarts at each document.

Legend: as megacpp/kernels/mamba3/inputs.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.mamba3.inputs import HeadWeights, Mamba3State, Pairing, ScanInputs
from megacpp.kernels.mamba3.ops import check_contract, from_halves, to_halves
from megacpp.kernels.recurrent_gates import gated_ranks
from megacpp.model.documents import Documents
from megacpp.torch_extras import wide


def mamba3_step(
    inputs: ScanInputs, weights: HeadWeights, state: Mamba3State | None, pairing: Pairing
) -> tuple[Tensor, Mamba3State]:
    """Return the output `[B, 1, H, P]` of one token (T = 1), and the next state.

    Args:
        inputs: of the token.
        weights: of the heads.
        state: behind the token before; None: there is none.
        pairing: of the rotated dims.
    """
    check_contract(inputs, weights)
    V_BHP, ADT_BH, DT_BH = inputs.V[:, 0], inputs.ADT[..., 0], inputs.DT[..., 0]
    R, _, N = inputs.Q.shape[2:]
    state = state or Mamba3State.zeros(V_BHP, inputs.Angles.shape[-1], R, N)
    with torch.autocast(V_BHP.device.type, enabled=False):
        turn_BHA = math.pi * torch.tanh(wide(inputs.Angles[:, 0])) * DT_BH[..., None]
        angle_BHA = torch.remainder(state.angle + turn_BHA, 2 * math.pi)
        q_BHRN = _rotated(_per_head(inputs.Q, weights.Q_bias), angle_BHA, pairing)
        k_BHRN = _rotated(_per_head(inputs.K, weights.K_bias), angle_BHA, pairing)
        v_BHRP, before_BHRP = weights.ranks_of_token(V_BHP), weights.ranks_of_token(state.v)
        lambda_BH, alpha_BH = torch.sigmoid(wide(inputs.Trap[..., 0])), ADT_BH.exp()
        beta_BH, gamma_BH = alpha_BH * DT_BH * (1 - lambda_BH), DT_BH * lambda_BH
        ssm_BHPN = (
            alpha_BH[..., None, None] * state.ssm
            + beta_BH[..., None, None] * (before_BHRP.mT @ wide(state.k))
            + gamma_BH[..., None, None] * (v_BHRP.mT @ k_BHRN)
        )
        y_BHRP = q_BHRN @ ssm_BHPN.mT + weights.D[:, None, None] * v_BHRP
        gates = weights.norm, weights.mimo_z, weights.mimo_o
        how = {"norm_eps": weights.norm_eps, "dtype": V_BHP.dtype}
        y_B1HP = gated_ranks(y_BHRP[:, None], inputs.Z, *gates, **how)
    return y_B1HP, Mamba3State(angle_BHA, ssm_BHPN, k_BHRN, V_BHP)


def mamba3_sequential(
    inputs: ScanInputs,
    weights: HeadWeights,
    docs: Documents,
    pairing: Pairing,
    initial: Mamba3State | None = None,
) -> tuple[Tensor, Mamba3State]:
    """Return `mamba3_chunked` by `mamba3_step`, reset where documents start: the reference.

    Args:
        inputs: of every token.
        weights: of the heads.
        docs: documents.
        pairing: of the rotated dims.
        initial: state in front of each row; None: zeros.
    """
    state, ys_B1HP = initial, []
    for t in range(inputs.V.shape[1]):
        if state is not None and t > 0:
            state = state.kept(docs.ids_BT[:, t] == docs.ids_BT[:, t - 1])
        token = inputs.part(slice(None), slice(t, t + 1))
        y_B1HP, state = mamba3_step(token, weights, state, pairing)
        ys_B1HP.append(y_B1HP)
    assert state is not None  # a row has a token
    return torch.cat(ys_B1HP, 1), state


def _per_head(x_B1RGN: Tensor, bias_HRN: Tensor) -> Tensor:
    x_BGRN = wide(x_B1RGN[:, 0]).transpose(1, 2)
    return x_BGRN.repeat_interleave(bias_HRN.shape[0] // x_BGRN.shape[1], 1) + bias_HRN


def _rotated(x_BHRN: Tensor, angle_BHA: Tensor, pairing: Pairing) -> Tensor:
    """Rotate pair i of N by angle i; pairs without an angle stay."""
    first, second = to_halves(x_BHRN, pairing).chunk(2, -1)
    angle = F.pad(angle_BHA, (0, first.shape[-1] - angle_BHA.shape[-1]))[:, :, None]
    cos, sin = angle.cos(), angle.sin()
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    return from_halves(turned, pairing)
