"""M2RNN recurrence (arXiv 2603.14360): a matrix state per head, updated through a tanh.

    h_t = f_t h_{t-1} + (1 - f_t) tanh(h_{t-1} W + k_t v_t^T)        y_t = q_t^T h_t

This is the definition under autograd. `m2rnn_chunked` (megacpp/kernels/m2rnn/backends.py) saves the
state only where chunks start and recomputes each chunk in backward. The tanh rules out a parallel
scan: tokens go one after another, in both.

Legend: B rows, T tokens of a row, N heads, K key, V value, S sequences: runs of tokens that share
a state, one per document, in the order of the flattened batch. Inputs may have fewer heads than N
when their number divides N; neighbouring heads then share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megacpp.kernels.m2rnn.backends import sequences_of
from megacpp.kernels.m2rnn.chunks import StateClip, heads_and_dtype, repeat_heads
from megacpp.torch_extras import no_autocast

if TYPE_CHECKING:
    from megacpp.model.documents import Documents


def m2rnn_sequential(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    f_BTN: Tensor,
    w_NVV: Tensor,
    docs: Documents | None = None,
    initial_SNKV: Tensor | None = None,
    clip: StateClip | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, T, N, V]` and final states `[S, N, K, V]`, token by token under autograd.

    States are fp32 (fp64 when an input is); outputs have the dtype of `v_BTNV`. A row's first
    token always starts a sequence, whatever `docs` says.

    Args:
        q_BTNK: queries.
        k_BTNK: keys.
        v_BTNV: values.
        f_BTN: forget values in (0, 1).
        w_NVV: state weight, applied from the right.
        docs: the state restarts with each document; None: one document per row.
        initial_SNKV: the state before each sequence; None: zeros.
        clip: bound of the state's gradient; None: none.
    """
    seqs = sequences_of(docs, v_BTNV)
    (B, T), K, V = v_BTNV.shape[:2], k_BTNK.shape[-1], v_BTNV.shape[-1]
    num_heads, dtype = heads_and_dtype(q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV)
    h_BNKV = torch.zeros(B, num_heads, K, V, dtype=dtype, device=v_BTNV.device)
    ys_BNV, hs_BNKV = [], []
    for t in range(T):
        start_BNKV = initial_SNKV[seqs.index_BT[:, t]] if initial_SNKV is not None else 0.0
        h_BNKV = torch.where(seqs.starts_BT[:, t, None, None, None], start_BNKV, h_BNKV)
        y_BNV, h_BNKV = m2rnn_step(
            q_BTNK[:, t], k_BTNK[:, t], v_BTNV[:, t], f_BTN[:, t], w_NVV, h_BNKV, clip
        )
        ys_BNV.append(y_BNV)
        hs_BNKV.append(h_BNKV)
    return torch.stack(ys_BNV, 1), torch.stack(hs_BNKV, 1)[seqs.ends_BT]


def m2rnn_step(
    q_BNK: Tensor,
    k_BNK: Tensor,
    v_BNV: Tensor,
    f_BN: Tensor,
    w_NVV: Tensor,
    h_BNKV: Tensor,
    clip: StateClip | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output `[B, N, V]` of one token in the dtype of `v_BNV`, and the next state.

    Args:
        q_BNK: queries.
        k_BNK: keys.
        v_BNV: values.
        f_BN: forget values in (0, 1).
        w_NVV: state weight, applied from the right.
        h_BNKV: state in front of the token.
        clip: bound of the state's gradient; None: none.
    """
    num_heads, dtype = h_BNKV.shape[1], h_BNKV.dtype
    q_BNK, k_BNK, v_wide_BNV, f_BN11, w_NVV = (
        repeat_heads(x.to(dtype), num_heads, dim)
        for x, dim in ((q_BNK, 1), (k_BNK, 1), (v_BNV, 1), (f_BN[..., None, None], 1), (w_NVV, 0))
    )
    with no_autocast(v_BNV):
        x_BNKV = h_BNKV @ w_NVV + k_BNK[..., :, None] * v_wide_BNV[..., None, :]
        h_BNKV = f_BN11 * h_BNKV + (1 - f_BN11) * torch.tanh(x_BNKV)
        if clip is not None and clip.mode == "total":
            h_BNKV = _clip_gradient(h_BNKV, clip.limit)
        y_BNV = (q_BNK[..., None, :] @ h_BNKV)[..., 0, :].to(v_BNV.dtype)
        if clip is not None and clip.mode == "carried":
            h_BNKV = _clip_gradient(h_BNKV, clip.limit)
    return y_BNV, h_BNKV


def _clip_gradient(h_BNKV: Tensor, bound: float) -> Tensor:
    """Return h itself, whose gradient is clipped in the backward."""
    if h_BNKV.requires_grad:
        h_BNKV = h_BNKV.clone()
        h_BNKV.register_hook(lambda dh_BNKV: dh_BNKV.clamp(-bound, bound))
    return h_BNKV
