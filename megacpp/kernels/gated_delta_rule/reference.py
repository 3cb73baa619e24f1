"""Gated delta rule (arXiv 2412.06464): a matrix state that decays, erases and writes per token.

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

with alpha = exp(g), k of length 1 and q of length K^-0.5. The state decays before it erases: the
value under k_t is read from alpha_t S_{t-1}. `gated_delta_sequential` is the definition under
autograd; megacpp/kernels/gated_delta_rule/chunks.py has the fast form.

Legend: B rows, T tokens of a row, H key heads, N value heads (N / H neighbours share a key head),
K key, V value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.model.documents import Documents
from megacpp.torch_extras import no_autocast, wide

NORM_EPS = 1e-6  # of the squared length, as upstream


def gated_delta_sequential(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTNV: Tensor,
    g_BTN: Tensor,
    beta_BTN: Tensor,
    docs: Documents | None = None,
    initial_BNKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, T, N, V]` and the state after each row, `[B, N, K, V]`, token by token.

    Args:
        q_BTHK: queries before normalisation.
        k_BTHK: keys before normalisation.
        v_BTNV: values; outputs have their dtype.
        g_BTN: log decay, at most 0.
        beta_BTN: write strength in [0, 2].
        docs: the state restarts with each document; None: one document per row.
        initial_BNKV: the state that the first document of each row continues from; None: zeros.
    """
    B, T, N, V = v_BTNV.shape
    S_BNKV = wide(v_BTNV).new_zeros(B, N, k_BTHK.shape[-1], V)
    if initial_BNKV is not None:
        S_BNKV = wide(initial_BNKV)
    outputs = []
    for t in range(T):
        if docs is not None and t > 0:
            S_BNKV = S_BNKV.masked_fill(docs.starts_BT[:, t, None, None, None], 0.0)
        o_BNV, S_BNKV = gated_delta_step(
            q_BTHK[:, t], k_BTHK[:, t], v_BTNV[:, t], g_BTN[:, t], beta_BTN[:, t], S_BNKV
        )
        outputs.append(o_BNV)
    return torch.stack(outputs, 1), S_BNKV


def gated_delta_step(
    q_BHK: Tensor, k_BHK: Tensor, v_BNV: Tensor, g_BN: Tensor, beta_BN: Tensor, S_BNKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Output `[B, N, V]` of one token in the dtype of `v_BNV`, and the next state.

    Args:
        q_BHK: query before normalisation.
        k_BHK: key before normalisation.
        v_BNV: value.
        g_BN: log decay.
        beta_BN: write strength.
        S_BNKV: state before the token, at least fp32.
    """
    each = v_BNV.shape[1] // k_BHK.shape[1]
    with no_autocast(v_BNV):
        k_BNK = unit(k_BHK).repeat_interleave(each, 1)
        q_BNK = unit(q_BHK).repeat_interleave(each, 1) * k_BHK.shape[-1] ** -0.5
        S_BNKV = wide(g_BN).exp()[..., None, None] * S_BNKV
        held_BNV = (k_BNK[..., None, :] @ S_BNKV)[..., 0, :]
        u_BNV = wide(beta_BN)[..., None] * (wide(v_BNV) - held_BNV)
        S_BNKV = S_BNKV + k_BNK[..., :, None] * u_BNV[..., None, :]
        o_BNV = (q_BNK[..., None, :] @ S_BNKV)[..., 0, :]
    return o_BNV.to(v_BNV.dtype), S_BNKV


def unit(x: Tensor) -> Tensor:
    """Return `x`, of any shape, divided by its length over the last dim, in at least fp32."""
    x = wide(x)
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
