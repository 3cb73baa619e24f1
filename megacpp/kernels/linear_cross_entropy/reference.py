"""Cross entropy of a linear head in whole logits, and statistics of shards, for comparison.

Legend: N tokens, D model, V vocabulary, n tokens of a chunk, v words of a vocabulary shard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.linear_cross_entropy.chunked import (
    IGNORED,
    CrossEntropy,
    ShardStatistics,
    chunk_rows,
    exponentiate,
    join_chunks,
    soft_cap,
)
from megacpp.torch_extras import wide


def linear_cross_entropy_plain(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weight_N: Tensor | None = None,
) -> CrossEntropy:
    """Return `linear_cross_entropy` from whole logits and autograd: the reference.

    Args:
        x_ND: hidden states.
        weight_VD: words.
        target_N: int64 in [0, V), or -100 to ignore a token.
        softcap: None: none.
        z_loss: coefficient of lse².
        weight_N: factors of the tokens' losses in `loss_sum`.
    """
    logits_NV = soft_cap(wide(F.linear(x_ND, weight_VD)), softcap)
    valid_N = target_N != IGNORED
    nll_N = F.cross_entropy(logits_NV, target_N, reduction="none", ignore_index=IGNORED)
    lse_N = logits_NV.logsumexp(1)
    counts_N = valid_N if weight_N is None else valid_N * weight_N
    loss_sum = ((nll_N + z_loss * lse_N.square()) * counts_N).sum()
    nll_N = nll_N.detach()
    return CrossEntropy(loss_sum, valid_N.sum(), nll_N.sum(), lse_N.detach(), nll_N)


@torch.no_grad()
def vocab_shard_statistics(
    x_ND: Tensor,
    weight_vD: Tensor,
    target_N: Tensor,
    first: int,
    softcap: float | None = None,
    chunk: int | None = None,
) -> ShardStatistics:
    """Return statistics of the words `[first, first + v)`, a chunk of tokens at a time.

    Args:
        x_ND: hidden states.
        weight_vD: `[v, D]`, words of the shard.
        target_N: words of the whole vocabulary.
        first: number of the shard's first word.
        softcap: None: none.
        chunk: tokens at a time, by default `chunk_rows`.
    """
    local_N = target_N - first
    here_N = (local_N >= 0) & (local_N < weight_vD.shape[0])
    index_N = torch.where(here_N, local_N, 0)
    rows = chunk or chunk_rows(x_ND, weight_vD)
    chunks = (t.split(rows) for t in (x_ND, index_N, here_N))
    parts = []
    for x_nD, index_n, here_n in zip(*chunks, strict=True):
        logits_nv = soft_cap(wide(x_nD @ weight_vD.T), softcap)
        parts.append(exponentiate(logits_nv, index_n, here_n))
    return join_chunks(parts)
