"""Causal attention over packed documents: the definition, one query after another.

Legend: as reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.model.documents import Documents


def attention_reference(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    docs: Documents,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return attention `[B, T, N, V]`, one query after another: the definition.

    o_t = sum_s p_ts v_s with p_t = softmax_s(cap(scale * q_t . k_s)), cap(z) = c tanh(z / c), over
    the tokens s from the start of t's document, or of its window, to t. Nothing is masked: keys of
    other documents are never read.

    Args: as `causal_attention` (causal.py).
    """
    group = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH, v_BTNV = (t.repeat_interleave(group, dim=2) for t in (k_BTKH, v_BTKV))
    rows = []
    for b, positions in enumerate(docs.positions_BT.tolist()):
        tokens = []
        for t, position in enumerate(positions):
            reach = min(position + 1, docs.window or position + 1)
            seen = slice(t + 1 - reach, t + 1)
            logits_SN = scale * (k_BTNH[b, seen] * q_BTNH[b, t]).sum(-1)
            if softcap is not None:
                logits_SN = softcap * torch.tanh(logits_SN / softcap)
            p_SN = logits_SN.softmax(dim=0)
            tokens.append((p_SN[..., None] * v_BTNV[b, seen]).sum(0))
        rows.append(torch.stack(tokens))
    return torch.stack(rows)
