"""Lightning indexer: the choice of keys that a query attends to (DeepSeek-V3.2, arXiv 2512.02556).

Legend: B rows, T query tokens, S key tokens, I indexer heads, H indexer head dim, K keys chosen
of a query. Within a tile T and S are its part.

A query scores every key by a few small heads, I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]), all
heads on one key. Nothing here holds a number per head and pair of tokens: heads are added up one
after another, on a GPU some at once, as many as a budget of bytes allows, and choosing goes tile by
tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.autograd import wide
from megacpp.model.documents import Documents

QUERIES, KEYS = 256, 1024  # of a tile
# Bytes of the products of heads that are made at once; at least one head's. A CPU gains nothing; on
# a GPU a head alone is four launches, each too short to hide the next.
AT_ONCE = {"cpu": 0, "cuda": 256 << 20}


def index_scores(q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
    """Return sum_h w[t, h] relu(q[t, h] . k[s]) of all token pairs, `[B, T, S]` in fp32 or wider.

    Beside the result there is one more tensor of its size at a time, in the backward too.
    """
    with torch.autocast(q_BTIH.device.type, enabled=False):
        scores_BTS = _IndexScores.apply(q_BTIH, k_BSH, w_BTI)
    assert isinstance(scores_BTS, Tensor)
    return scores_BTS


class _IndexScores(torch.autograd.Function):
    """Scores that save q, k, w alone: backward computes the products of each head again."""

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


def heads_at_once(heads: int, numbers: int, width: int, device: str) -> int:
    """Return how many heads' products are made at once.

    Args:
        heads: of the indexer.
        numbers: of a head's product.
        width: bytes of a number.
        device: type of the device.
    """
    return min(heads, max(1, AT_ONCE.get(device, 0) // (numbers * width)))


def head_groups(q_BTIH: Tensor, k_BSH: Tensor) -> list[slice]:
    """Return the heads that are computed together; `k_BSH` has the dtype of the products."""
    heads, numbers = q_BTIH.shape[2], q_BTIH.shape[0] * q_BTIH.shape[1] * k_BSH.shape[1]
    step = heads_at_once(heads, max(1, numbers), k_BSH.element_size(), q_BTIH.device.type)
    return [slice(first, min(first + step, heads)) for first in range(0, heads, step)]


def tile_scores(q_BTIH: Tensor, k_BSH: Tensor, w_BTI: Tensor) -> Tensor:
    """Return the scores of a tile `[B, T, S]`, head added to head in one buffer; no gradient."""
    k_BSH, w_BTI = wide(k_BSH), wide(w_BTI)
    scores_BTS = k_BSH.new_zeros(*w_BTI.shape[:2], k_BSH.shape[1])
    for heads in head_groups(q_BTIH, k_BSH):
        w_BTG = w_BTI[:, :, heads]
        seen = (wide(q_BTIH[:, :, heads]).flatten(1, 2) @ k_BSH.mT).relu_()  # (T, G) to rows
        if w_BTG.shape[2] == 1:
            scores_BTS.addcmul_(seen, w_BTG)
        else:  # of each token a row of weights by its heads
            weights, keys = w_BTG.flatten(0, 1)[:, None], seen.shape[-1]
            scores_BTS.view(-1, 1, keys).baddbmm_(weights, seen.view(*weights.shape[::2], keys))
        del seen  # before the next heads' is made
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
    """Compute dq and dw from the gradient of a tile's scores, and add its dk.

    With u = sum_s d[t, s] k[s] over the keys that head h sees (q . k > 0), dq = w u and dw = q . u:
    one product for both.

    Args:
        d_BTS: gradient of the scores.
        q_BTIH: queries.
        k_BSH: keys.
        w_BTI: weights.
        dq_BTIH: overwritten.
        dk_BSH: added to.
        dw_BTI: overwritten.
    """
    k_BSH, w_BTI = wide(k_BSH), wide(w_BTI)
    for heads in head_groups(q_BTIH, k_BSH):
        q_BTGH, w_BTG1 = wide(q_BTIH[:, :, heads]), w_BTI[:, :, heads, None]
        q_BXH = q_BTGH.flatten(1, 2)  # X: T times heads
        seen_BXS = (q_BXH @ k_BSH.mT).gt_(0)
        seen_BXS.unflatten(1, q_BTGH.shape[1:3]).mul_(d_BTS[:, :, None])
        u_BTGH = (seen_BXS @ k_BSH).view_as(q_BTGH)
        dw_BTI[:, :, heads] = (q_BTGH * u_BTGH).sum(-1)
        dq_BTIH[:, :, heads] = u_BTGH.mul_(w_BTG1)
        dk_BSH.add_(seen_BXS.mT @ (q_BTGH * w_BTG1).flatten(1, 2))
        del seen_BXS  # before the next heads' is made


def query_blocks(tokens: int) -> list[slice]:
    """Return the queries of each row of tiles; the last sees most keys."""
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
    """Return the `top_k` visible keys of each query with the highest scores, int32 `[B, T, K]`.

    Numbers of keys (in S) in ascending order, then -1 in the remaining slots where a query
    sees fewer than K = min(top_k, S) keys. Of equal scores the later key is taken, so that the
    choice doesn't depend on how the tokens were split into tiles or over processes.

    Args:
        q_BTIH: queries.
        k_BSH: keys.
        w_BTI: weights.
        queries: documents of the T query tokens; a part of the row (`Documents.take`) sees what it
            saw in the row. The same object as `keys`: T = S, and later keys are skipped.
        keys: documents of the S key tokens, of whole rows.
        top_k: keys of a query.
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
    """Run `choose_keys` for some rows among the keys before `end`, a tile of keys at a time."""
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
    """Return the `slots` largest scores and their numbers, in order; -inf and -1 in the rest."""
    taken_BTX = _taken(scores_BTX, slots)
    # Place of each taken one; the others go to one slot too many, which is cut off.
    place_BTX = taken_BTX.cumsum(-1).sub_(1).masked_fill_(taken_BTX.logical_not_(), slots)
    shape = (*scores_BTX.shape[:-1], slots + 1)
    best = scores_BTX.new_full(shape, -torch.inf).scatter_(-1, place_BTX, scores_BTX)
    number = number_BTX.new_full(shape, -1).scatter_(-1, place_BTX, number_BTX)
    return best[..., :slots], number[..., :slots]


def _taken(scores_BTX: Tensor, slots: int) -> Tensor:
    """Return bool: the `slots` largest scores above -inf, of equal ones the last; branch-free.

    A sort would order ties as it likes, and the indices of topk are such a sort's.
    """
    least_BT1 = scores_BTX.topk(slots, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_BTX = scores_BTX > least_BT1
    equal_BTX = (scores_BTX == least_BT1).logical_and_(scores_BTX > -torch.inf)
    free_BT1 = slots - above_BTX.sum(-1, keepdim=True, dtype=torch.int32)
    number_BTX = equal_BTX.cumsum(-1, dtype=torch.int32)
    late_BTX = number_BTX > number_BTX[..., -1:] - free_BT1
    return above_BTX.logical_or_(late_BTX.logical_and_(equal_BTX))
