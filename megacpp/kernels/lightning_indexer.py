"""The lightning indexer: which keys a query attends to (DeepSeek-V3.2, arXiv 2512.02556).

Legend: B rows, T query tokens, S key tokens, I indexer heads, H indexer head dim, K keys chosen
of a query. Within a tile T and S are its part.

A query scores every key by a few small heads, I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]), all
heads on one key. Nothing here holds a number per head and pair of tokens: heads are added up one
after another, and choosing goes tile by tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.attention import document_mask
from megacpp.model.documents import Documents
from megacpp.model.fp32 import wide

QUERIES, KEYS = 256, 1024  # of a tile


def index_scores(q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
    """sum_h w[t, h] relu(q[t, h] . k[s]) for every pair of tokens, `[B, T, S]` in fp32 or wider.

    Beside the result there is one more tensor of its size at a time, in the backward too.
    """
    with torch.autocast(q_BTIH.device.type, enabled=False):
        scores_BTS = _IndexScores.apply(q_BTIH, k_BSH, w_BTI)
    assert isinstance(scores_BTS, Tensor)
    return scores_BTS


class _IndexScores(torch.autograd.Function):
    """Keeps q, k, w alone: backward makes the products of each head again."""

    @staticmethod
    def forward(ctx: Any, q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
        ctx.save_for_backward(q_BTIH, k_BSH, w_BTI)
        return tile_scores(q_BTIH, k_BSH, w_BTI)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_BTS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BTIH, k_BSH, w_BTI = ctx.saved_tensors
        dq, dw, dk = (
            torch.empty_like(q_BTIH),
            torch.empty_like(w_BTI),
            torch.zeros_like(wide(k_BSH)),
        )
        with torch.autocast(d_BTS.device.type, enabled=False):
            tile_gradients(d_BTS, q_BTIH, k_BSH, w_BTI, dq, dk, dw)
        return dq, dk.to(k_BSH.dtype), dw


def tile_scores(q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
    """The scores of a tile `[B, T, S]`, head added to head in one buffer; no gradient."""
    k_BHS, w_BTI = wide(k_BSH).mT, wide(w_BTI)
    scores_BTS = k_BHS.new_zeros(*w_BTI.shape[:2], k_BHS.shape[-1])
    for q_BTH, w_BT in zip(q_BTIH.unbind(2), w_BTI.unbind(2), strict=True):
        scores_BTS.addcmul_((wide(q_BTH) @ k_BHS).relu_(), w_BT[..., None])
    return scores_BTS


def tile_gradients(
    d_BTS: Tensor,
    q_BTIH: Tensor,
    k_BSH: Tensor,
    w_BTI: Tensor,
    dq_BTIH: Tensor,
    dk_BSH: Tensor,
    dw_BTI: Tensor,
) -> None:
    """From the gradient of a tile's scores: dq and dw are set, what it gives to dk is added.

    With u = sum_s d[t, s] k[s] over the keys that head h sees (q . k > 0), dq = w u and dw = q . u:
    one product for both.
    """
    k_BSH, w_BTI = wide(k_BSH), wide(w_BTI)
    for head in range(q_BTIH.shape[2]):
        q_BTH, w_BT1 = wide(q_BTIH[:, :, head]), w_BTI[:, :, head, None]
        seen_BTS = (q_BTH @ k_BSH.mT).gt_(0).mul_(d_BTS)
        u_BTH = seen_BTS @ k_BSH
        dw_BTI[:, :, head] = (q_BTH * u_BTH).sum(-1)
        dq_BTIH[:, :, head] = u_BTH.mul_(w_BT1)
        dk_BSH.add_(seen_BTS.mT @ (q_BTH * w_BT1))
        del seen_BTS  # before the next head's is made


def query_blocks(tokens: int) -> list[slice]:
    """The queries of each row of tiles; the last sees most keys."""
    return [slice(start, min(start + QUERIES, tokens)) for start in range(0, tokens, QUERIES)]


@torch.no_grad()
def choose_keys(
    q_BTIH: Tensor,
    k_BSH: Tensor,
    w_BTI: Tensor,
    queries: Documents,
    keys: Documents,
    top_k: int,
) -> Tensor:
    """The `top_k` visible keys of each query with the highest scores, int32 `[B, T, K]`.

    Numbers of keys (in S) in ascending order, then -1 in the slots that are left where a query
    sees fewer than K = min(top_k, S) keys. Of equal scores the later key is taken, so that the
    choice doesn't depend on how the tokens were cut into tiles or over processes.

    Args:
        queries: documents of the T query tokens; a part of the row (`Documents.take`) sees what it
            saw in the row. The same object as `keys`: T = S, and later keys are skipped.
        keys: documents of the S key tokens, of whole rows.
    """
    batch, tokens, num_keys = *q_BTIH.shape[:2], k_BSH.shape[1]
    slots = min(top_k, num_keys)
    chosen_BTK = torch.empty(batch, tokens, slots, dtype=torch.int32, device=q_BTIH.device)
    with torch.autocast(q_BTIH.device.type, enabled=False):
        for rows in query_blocks(tokens):
            end = rows.stop if queries is keys else num_keys
            chosen_BTK[:, rows] = _choose(q_BTIH, k_BSH, w_BTI, queries, keys, rows, end, slots)
    return chosen_BTK


def _choose(
    q_BTIH: Tensor,
    k_BSH: Tensor,
    w_BTI: Tensor,
    queries: Documents,
    keys: Documents,
    rows: slice,
    end: int,
    slots: int,
) -> Tensor:
    """`choose_keys` for some rows among the keys before `end`, a tile of keys at a time."""
    q_BTIH, w_BTI = q_BTIH[:, rows], w_BTI[:, rows]
    best_BTK = wide(w_BTI.new_empty(0)).new_full((*w_BTI.shape[:2], slots), float("-inf"))
    number_BTK = torch.full_like(best_BTK, -1, dtype=torch.int32)
    for first in range(0, end, KEYS):
        cols = slice(first, min(first + KEYS, end))
        scores_BTS = tile_scores(q_BTIH, k_BSH[:, cols], w_BTI)
        hidden_BTS = ~document_mask(queries, keys, rows, cols)[:, 0]
        # The best so far come first: numbers stay in ascending order.
        scores_BTX = torch.cat((best_BTK, scores_BTS.masked_fill_(hidden_BTS, -torch.inf)), dim=-1)
        del scores_BTS, hidden_BTS
        number_S = torch.arange(cols.start, cols.stop, dtype=torch.int32, device=k_BSH.device)
        number_S = number_S.expand(*best_BTK.shape[:2], -1)
        number_BTX = torch.cat((number_BTK, number_S), dim=-1)
        best_BTK, number_BTK = _best(scores_BTX, number_BTX, slots)
        del scores_BTX, number_BTX  # before the next tile is made
    return number_BTK


def _best(scores_BTX: Tensor, number_BTX: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """The `slots` largest scores and their numbers in the order they came, -inf and -1 behind."""
    taken_BTX = _taken(scores_BTX, slots)
    # Place of each taken one; the others go to one slot too many, which is cut off.
    place_BTX = taken_BTX.cumsum(-1).sub_(1).masked_fill_(taken_BTX.logical_not_(), slots)
    shape = (*scores_BTX.shape[:-1], slots + 1)
    best = scores_BTX.new_full(shape, -torch.inf).scatter_(-1, place_BTX, scores_BTX)
    number = number_BTX.new_full(shape, -1).scatter_(-1, place_BTX, number_BTX)
    return best[..., :slots], number[..., :slots]


def _taken(scores_BTX: Tensor, slots: int) -> Tensor:
    """bool: the `slots` largest scores above -inf, of equal ones the last; branch-free.

    A sort would order ties as it likes, and the indices of topk are such a sort's.
    """
    least_BT1 = scores_BTX.topk(slots, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_BTX = scores_BTX > least_BT1
    equal_BTX = (scores_BTX == least_BT1).logical_and_(scores_BTX > -torch.inf)
    free_BT1 = slots - above_BTX.sum(-1, keepdim=True, dtype=torch.int32)
    number_BTX = equal_BTX.cumsum(-1, dtype=torch.int32)
    late_BTX = number_BTX > number_BTX[..., -1:] - free_BT1
    return above_BTX.logical_or_(late_BTX.logical_and_(equal_BTX))
