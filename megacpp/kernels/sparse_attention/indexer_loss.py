"""Loss of the indexer: how far its scores are from the attention's probabilities.

Legend: B rows, T query tokens, S key tokens, J indexer heads, X indexer head dim, N attention heads
of this process, K attention key heads, G = N / K, H attention head dim, C chosen keys of a query,
U the keys that are compared: S or C. Within a block T and S are its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.sparse_attention.indexer import query_blocks, tile_gradients, tile_scores
from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable, wide


@dataclass(frozen=True)
class HeadShard:
    """Attention heads of this process, when they are sharded over several.

    Attributes:
        total: heads of all processes.
        add: sums a block `[B, t, U]` over the processes; called once a block of queries.
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


def indexer_loss(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, target: Target) -> Tensor:
    """Sum KL(p || softmax(I)) over queries, in fp32 or wider; I as in `index_scores`.

    p is the mean over heads of the attention probabilities over the compared keys. Gradients are
    made in the forward, a block of queries at a time, where dKL/dI = softmax(I) - p exactly; the
    backward scales them in place and so runs once. Nothing of size `[T, S]` outlives a block.

    Args:
        q_BTJX: queries of the indexer.
        k_BSX: keys of the indexer.
        w_BTJ: weights of its heads.
        target: of the scores.
    """
    grad = torch.is_grad_enabled()  # inside the function it is always off
    with torch.autocast(q_BTJX.device.type, enabled=False):
        loss = _IndexerLoss.apply(q_BTJX, k_BSX, w_BTJ, target, grad)
    assert isinstance(loss, Tensor)
    return loss


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, target: Target, grad: bool
    ) -> Tensor:
        grad = grad and any(ctx.needs_input_grad)
        dq, dw = (torch.empty_like(x) if grad else None for x in (q_BTJX, w_BTJ))
        dk_BSX = torch.zeros_like(wide(k_BSX)) if grad else None
        loss_BT = wide(w_BTJ.new_empty(*w_BTJ.shape[:2]))
        for rows in query_blocks(w_BTJ.shape[1]):
            cols = slice(rows.stop if target.queries is target.keys else k_BSX.shape[1])
            parts = q_BTJX[:, rows], k_BSX[:, cols], w_BTJ[:, rows]
            loss_BT[:, rows], d_BTS = _block_loss(tile_scores(*parts), target, rows, cols)
            if dq is not None and dw is not None and dk_BSX is not None:
                into = dq[:, rows], dk_BSX[:, cols], dw[:, rows]
                tile_gradients(d_BTS, *parts, *into)
            del d_BTS  # before the next block's scores are made
        ctx.save_for_backward(dq, None if dk_BSX is None else dk_BSX.to(k_BSX.dtype), dw)
        return loss_BT.sum()

    @staticmethod
    @once_differentiable
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
        allowed_BTU = document_mask(target.queries, target.keys, rows, cols)[:, 0]
        index_BTU, compared_BTU = None, scores_BTS
    else:
        chosen_BTU = target.chosen_BTC[:, rows]
        allowed_BTU, index_BTU = chosen_BTU >= 0, chosen_BTU.clamp(min=0).to(torch.int64)
        compared_BTU = scores_BTS.gather(-1, index_BTU)
    p_BTU = _probabilities(target, rows, cols, allowed_BTU, index_BTU)
    hidden_BTU = ~allowed_BTU
    log_BTU = compared_BTU.masked_fill_(hidden_BTU, float("-inf")).log_softmax(-1)
    log_BTU.masked_fill_(hidden_BTU, 0.0)  # where p is 0 too: 0 * -inf is no number
    loss_BT = torch.xlogy(p_BTU, p_BTU).sum(-1) - (p_BTU * log_BTU).sum(-1)
    d_BTU = log_BTU.exp_().masked_fill_(hidden_BTU, 0.0).sub_(p_BTU)
    if index_BTU is None:
        return loss_BT, d_BTU
    return loss_BT, scores_BTS.zero_().scatter_add_(-1, index_BTU, d_BTU)


def _probabilities(
    target: Target, rows: slice, cols: slice, allowed_BTU: Tensor, index_BTU: Tensor | None
) -> Tensor:
    """Mean of the attention probabilities of all heads over the compared keys, 0 elsewhere."""
    q_BTNH, k_BSKH = target.q_BTNH[:, rows], target.k_BSKH[:, cols]
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    p_BTU = wide(q_BTNH.new_empty(0)).new_zeros(allowed_BTU.expand(len(q_BTNH), -1, -1).shape)
    for head in each_head(q_BTNH.shape[2]):
        q_BTH, k_BSH = q_BTNH[:, :, head], k_BSKH[:, :, head // group]
        p_BTU += _of_head(q_BTH, k_BSH, target, allowed_BTU, index_BTU)
    if target.shard is None:
        return p_BTU.div_(q_BTNH.shape[2])
    return target.shard.add(p_BTU) / target.shard.total


def each_head(heads: int) -> list[int]:
    """Return the numbers of the heads, whose probabilities are made one after the other."""
    return list(range(heads))


def _of_head(
    q_BTH: Tensor, k_BSH: Tensor, target: Target, allowed_BTU: Tensor, index_BTU: Tensor | None
) -> Tensor:
    """Attention probabilities of one head over the compared keys `[B, T, U]`."""
    logits_BTU = wide(q_BTH) @ wide(k_BSH).mT
    if index_BTU is not None:
        logits_BTU = logits_BTU.gather(-1, index_BTU)
    if target.softcap is None:
        logits_BTU.mul_(target.scale)
    else:
        logits_BTU.mul_(target.scale / target.softcap).tanh_().mul_(target.softcap)
    return logits_BTU.masked_fill_(~allowed_BTU, float("-inf")).softmax(-1)
