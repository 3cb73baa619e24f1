"""Loss of the indexer: how far its scores are from the attention's probabilities.

Legend: B rows, T query tokens, S key tokens, I indexer heads, D indexer head dim, N attention heads
of this process, K attention key heads, G = N / K, H attention head dim, C chosen keys of a query,
X the keys that are compared: S or C. Within a block T and S are its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.autograd import wide
from megacpp.kernels.sparse_attention.indexer import query_blocks, tile_gradients, tile_scores
from megacpp.model.documents import Documents


@dataclass(frozen=True)
class HeadShard:
    """Attention heads of this process, when they are sharded over several.

    Attributes:
        total: heads of all processes.
        add: sums a block `[B, t, X]` over the processes; called once a block of queries.
    """

    total: int
    add: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Target:
    """Target of the scores: the mean of the attention probabilities of all heads.

    Attributes:
        q_BTNH, k_BSKH: of the main attention; no gradient flows to them.
        scale, softcap: of its logits.
        queries, keys: documents of T and S; the same object: T = S, and later keys are skipped.
        chosen_BTC: compare only these keys (-1: unused slot), or all that are visible.
        shard: for heads that are sharded over processes.
    """

    q_BTNH: Tensor
    k_BSKH: Tensor
    scale: float
    softcap: float | None
    queries: Documents
    keys: Documents
    chosen_BTC: Tensor | None = None
    shard: HeadShard | None = None


def indexer_loss(q_BTID: Tensor, k_BSD: Tensor, w_BTI: Tensor, target: Target) -> Tensor:
    """Sum KL(p || softmax(I)) over queries, in fp32 or wider; I as in `index_scores`.

    p is the mean over heads of the attention probabilities over the compared keys. Gradients are
    made in the forward, a block of queries at a time, where dKL/dI = softmax(I) - p exactly; the
    backward scales them in place and so runs once. Nothing of size `[T, S]` outlives a block.

    Args:
        q_BTID: queries of the indexer.
        k_BSD: keys of the indexer.
        w_BTI: weights of its heads.
        target: of the scores.
    """
    grad = torch.is_grad_enabled()  # inside the function it is always off
    with torch.autocast(q_BTID.device.type, enabled=False):
        loss = _IndexerLoss.apply(q_BTID, k_BSD, w_BTI, target, grad)
    assert isinstance(loss, Tensor)
    return loss


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BTID: Tensor, k_BSD: Tensor, w_BTI: Tensor, target: Target, grad: bool
    ) -> Tensor:
        grad = grad and any(ctx.needs_input_grad)
        dq, dw = (torch.empty_like(x) if grad else None for x in (q_BTID, w_BTI))
        dk_BSD = torch.zeros_like(wide(k_BSD)) if grad else None
        loss_BT = wide(w_BTI.new_empty(*w_BTI.shape[:2]))
        for rows in query_blocks(w_BTI.shape[1]):
            cols = slice(rows.stop if target.queries is target.keys else k_BSD.shape[1])
            parts = q_BTID[:, rows], k_BSD[:, cols], w_BTI[:, rows]
            loss_BT[:, rows], d_BTS = _block_loss(tile_scores(*parts), target, rows, cols)
            if dq is not None and dw is not None and dk_BSD is not None:
                into = dq[:, rows], dk_BSD[:, cols], dw[:, rows]
                tile_gradients(d_BTS, *parts, *into)
            del d_BTS  # before the next block's scores are made
        ctx.save_for_backward(dq, None if dk_BSD is None else dk_BSD.to(k_BSD.dtype), dw)
        return loss_BT.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        for grad in grads:
            grad.mul_(scale)  # a second backward is refused by the version counter
        return *grads, None, None


def _block_loss(
    scores_BTS: Tensor, target: Target, rows: slice, cols: slice
) -> tuple[Tensor, Tensor]:
    """Return the KL of each query of a block `[B, T]`, and its gradient by the scores, in place."""
    if target.chosen_BTC is None:
        allowed_BTX = document_mask(target.queries, target.keys, rows, cols)[:, 0]
        index_BTX, compared_BTX = None, scores_BTS
    else:
        chosen_BTX = target.chosen_BTC[:, rows]
        allowed_BTX, index_BTX = chosen_BTX >= 0, chosen_BTX.clamp(min=0).to(torch.int64)
        compared_BTX = scores_BTS.gather(-1, index_BTX)
    p_BTX = _probabilities(target, rows, cols, allowed_BTX, index_BTX)
    hidden_BTX = ~allowed_BTX
    log_BTX = compared_BTX.masked_fill_(hidden_BTX, float("-inf")).log_softmax(-1)
    log_BTX.masked_fill_(hidden_BTX, 0.0)  # where p is 0 too: 0 * -inf is no number
    loss_BT = torch.xlogy(p_BTX, p_BTX).sum(-1) - (p_BTX * log_BTX).sum(-1)
    d_BTX = log_BTX.exp_().masked_fill_(hidden_BTX, 0.0).sub_(p_BTX)
    if index_BTX is None:
        return loss_BT, d_BTX
    return loss_BT, scores_BTS.zero_().scatter_add_(-1, index_BTX, d_BTX)


def _probabilities(
    target: Target, rows: slice, cols: slice, allowed_BTX: Tensor, index_BTX: Tensor | None
) -> Tensor:
    """Mean of the attention probabilities of all heads over the compared keys, 0 elsewhere."""
    q_BTNH, k_BSKH = target.q_BTNH[:, rows], target.k_BSKH[:, cols]
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    p_BTX = wide(q_BTNH.new_empty(0)).new_zeros(allowed_BTX.expand(len(q_BTNH), -1, -1).shape)
    for head in each_head(q_BTNH.shape[2]):
        q_BTH, k_BSH = q_BTNH[:, :, head], k_BSKH[:, :, head // group]
        p_BTX += _of_head(q_BTH, k_BSH, target, allowed_BTX, index_BTX)
    if target.shard is None:
        return p_BTX.div_(q_BTNH.shape[2])
    return target.shard.add(p_BTX) / target.shard.total


def each_head(heads: int) -> list[int]:
    """Return the numbers of the heads, whose probabilities are made one after the other."""
    return list(range(heads))


def _of_head(
    q_BTH: Tensor,
    k_BSH: Tensor,
    target: Target,
    allowed_BTX: Tensor,
    index_BTX: Tensor | None,
) -> Tensor:
    """Attention probabilities of one head over the compared keys `[B, T, X]`."""
    logits_BTX = wide(q_BTH) @ wide(k_BSH).mT
    if index_BTX is not None:
        logits_BTX = logits_BTX.gather(-1, index_BTX)
    if target.softcap is None:
        logits_BTX.mul_(target.scale)
    else:
        logits_BTX.mul_(target.scale / target.softcap).tanh_().mul_(target.softcap)
    return logits_BTX.masked_fill_(~allowed_BTX, float("-inf")).softmax(-1)
