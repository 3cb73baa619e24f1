"""Assignment 5: ring attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def ring_attention(
    link: Any, q_NtH: Tensor, k_NtH: Tensor, v_NtH: Tensor, positions: Sequence[Sequence[int]]
) -> Tensor:
    """Return causal attention for this rank's queries, `[heads, tokens, width]`.

    Args:
        link: way to the other ranks.
        q_NtH: queries of this rank's tokens.
        k_NtH: their keys.
        v_NtH: their values.
        positions: positions in the row of each rank's tokens.
    """
    n, r = link.world, link.rank
    mine_t1 = torch.tensor(positions[r])[:, None]
    largest_Nt1 = torch.full_like(q_NtH[..., :1], -torch.inf)
    sum_Nt1, out_NtH = torch.zeros_like(largest_Nt1), torch.zeros_like(q_NtH)
    for hop in range(n):
        source = (r - hop) % n
        if hop < n - 1:
            link.send((r + 1) % n, k_NtH)
            link.send((r + 1) % n, v_NtH)
        hidden_tt = torch.tensor(positions[source])[None] > mine_t1
        score_Ntt = (q_NtH @ k_NtH.mT / q_NtH.shape[-1] ** 0.5).masked_fill(hidden_tt, -torch.inf)
        new_Nt1 = torch.maximum(largest_Nt1, score_Ntt.amax(-1, keepdim=True))
        safe_Nt1 = new_Nt1.clamp(min=torch.finfo(q_NtH.dtype).min)  # -inf: no key seen yet
        weight_Ntt, old_Nt1 = (score_Ntt - safe_Nt1).exp(), (largest_Nt1 - safe_Nt1).exp()
        sum_Nt1 = sum_Nt1 * old_Nt1 + weight_Ntt.sum(-1, keepdim=True)
        out_NtH = out_NtH * old_Nt1 + weight_Ntt @ v_NtH
        largest_Nt1 = new_Nt1
        if hop < n - 1:
            k_NtH, v_NtH = link.receive((r - 1) % n), link.receive((r - 1) % n)
    return out_NtH / sum_Nt1
