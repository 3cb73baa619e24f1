"""Lightning indexer: the choice of keys that a query attends to (DeepSeek-V3.2, arXiv 2512.02556).

Legend: B rows, T query tokens, S key tokens, J indexer heads, X indexer head dim, C keys chosen
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
from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable, wide

QUERIES, KEYS = 256, 1024  # of a tile
# Bytes of the products of heads that are made at once; at least one head's. A CPU gains nothing; on
# a GPU a head alone is four launches, each too short to hide the next.
AT_ONCE = {"cpu": 0, "cuda": 256 << 20}


def index_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor) -> Tensor:
    """Return sum_h w[t, h] relu(q[t, h] . k[s]) of all token pairs, `[B, T, S]` in fp32 or wider.

    Beside the result there is one more tensor of its size at a time, in the backward too.
    """
    with torch.autocast(q_BTJX.device.type, enabled=False):
        scores_BTS = _IndexScores.apply(q_BTJX, k_BSX, w_BTJ)
    assert isinstance(scores_BTS, Tensor)
    return scores_BTS


class _IndexScores(torch.autograd.Function):
    """Scores that save q, k, w alone: backward computes the products of each head again."""

    @staticmethod
    def forward(ctx: Any, q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor) -> Tensor:
        ctx.save_for_backward(q_BTJX, k_BSX, w_BTJ)
        return tile_scores(q_BTJX, k_BSX, w_BTJ)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_BTS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BTJX, k_BSX, w_BTJ = ctx.saved_tensors
        dq, dw, dk = (
            torch.empty_like(q_BTJX),
            torch.empty_like(w_BTJ),
            torch.zeros_like(wide(k_BSX)),
        )
        with torch.autocast(d_BTS.device.type, enabled=False):
            tile_gradients(d_BTS, q_BTJX, k_BSX, w_BTJ, dq, dk, dw)
        return dq, dk.to(k_BSX.dtype), dw


def heads_at_once(heads: int, numbers: int, width: int, device: str) -> int:
    """Return how many heads' products are made at once.

    Args:
        heads: of the indexer.
        numbers: of a head's product.
        width: bytes of a number.
        device: type of the device.
    """
    return min(heads, max(1, AT_ONCE.get(device, 0) // (numbers * width)))


def head_groups(q_BTJX: Tensor, k_BSX: Tensor) -> list[slice]:
    """Return the heads that are computed together; `k_BSX` has the dtype of the products."""
    heads, numbers = q_BTJX.shape[2], q_BTJX.shape[0] * q_BTJX.shape[1] * k_BSX.shape[1]
    device = "cuda" if q_BTJX.is_cuda else "cpu"
    step = heads_at_once(heads, max(1, numbers), k_BSX.element_size(), device)
    return [slice(first, min(first + step, heads)) for first in range(0, heads, step)]


def tile_scores(q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor) -> Tensor:
    """Return the scores of a tile `[B, T, S]`, head added to head in one buffer; no gradient."""
    k_BSX, w_BTJ = wide(k_BSX), wide(w_BTJ)
    scores_BTS = k_BSX.new_zeros(*w_BTJ.shape[:2], k_BSX.shape[1])
    for heads in head_groups(q_BTJX, k_BSX):
        w_BTG = w_BTJ[:, :, heads]
        seen = (wide(q_BTJX[:, :, heads]).flatten(1, 2) @ k_BSX.mT).relu_()  # (T, G) to rows
        if w_BTG.shape[2] == 1:
            scores_BTS.addcmul_(seen, w_BTG)
        else:  # of each token a row of weights by its heads
            weights, keys = w_BTG.flatten(0, 1)[:, None], seen.shape[-1]
            scores_BTS.view(-1, 1, keys).baddbmm_(weights, seen.view(*weights.shape[::2], keys))
        del seen  # before the next heads' is made
    return scores_BTS


def tile_gradients(
    d_BTS: Tensor,
    q_BTJX: Tensor,
    k_BSX: Tensor,
    w_BTJ: Tensor,
    dq_BTJX: Tensor,
    dk_BSX: Tensor,
    dw_BTJ: Tensor,
) -> None:
    """Compute dq and dw from the gradient of a tile's scores, and add its dk.

    With u = sum_s d[t, s] k[s] over the keys that head h sees (q . k > 0), dq = w u and dw = q . u:
    one product for both.

    Args:
        d_BTS: gradient of the scores.
        q_BTJX: queries.
        k_BSX: keys.
        w_BTJ: weights.
        dq_BTJX: overwritten.
        dk_BSX: added to.
        dw_BTJ: overwritten.
    """
    k_BSX, w_BTJ = wide(k_BSX), wide(w_BTJ)
    for heads in head_groups(q_BTJX, k_BSX):
        q_BTGX, w_BTG1 = wide(q_BTJX[:, :, heads]), w_BTJ[:, :, heads, None]
        q_BYX = q_BTGX.flatten(1, 2)  # Y: T times heads
        seen_BYS = (q_BYX @ k_BSX.mT).gt_(0)
        seen_BYS.unflatten(1, q_BTGX.shape[1:3]).mul_(d_BTS[:, :, None])
        u_BTGX = (seen_BYS @ k_BSX).view_as(q_BTGX)
        dw_BTJ[:, :, heads] = (q_BTGX * u_BTGX).sum(-1)
        dq_BTJX[:, :, heads] = u_BTGX.mul_(w_BTG1)
        dk_BSX.add_(seen_BYS.mT @ (q_BTGX * w_BTG1).flatten(1, 2))
        del seen_BYS  # before the next heads' is made


def query_blocks(tokens: int) -> list[slice]:
    """Return the queries of each row of tiles; the last sees most keys."""
    return [slice(start, min(start + QUERIES, tokens)) for start in range(0, tokens, QUERIES)]


@torch.no_grad()
def choose_keys(
    q_BTJX: Tensor, k_BSX: Tensor, w_BTJ: Tensor, queries: Documents, keys: Documents, top_k: int
) -> Tensor:
    """Return the `top_k` visible keys of each query with the highest scores, int32 `[B, T, C]`.

    Numbers of keys (in S) in ascending order, then -1 in the remaining slots where a query
    sees fewer than C = min(top_k, S) keys. Of equal scores the later key is taken, so that the
    choice doesn't depend on how the tokens were split into tiles or over processes.

    Args:
        q_BTJX: queries.
        k_BSX: keys.
        w_BTJ: weights.
        queries: documents of the T query tokens; a part of the row (`Documents.take`) sees what it
            saw in the row. The same object as `keys`: T = S, and later keys are skipped.
        keys: documents of the S key tokens, of whole rows.
        top_k: keys of a query.
    """
    batch, tokens, num_keys = *q_BTJX.shape[:2], k_BSX.shape[1]
    slots = min(top_k, num_keys)
    chosen_BTC = torch.empty(batch, tokens, slots, dtype=torch.int32, device=q_BTJX.device)
    with torch.autocast(q_BTJX.device.type, enabled=False):
        for rows in query_blocks(tokens):
            end = rows.stop if queries is keys else num_keys
            chosen_BTC[:, rows] = _choose(q_BTJX, k_BSX, w_BTJ, queries, keys, rows, end, slots)
    return chosen_BTC


def _choose(
    q_BTJX: Tensor,
    k_BSX: Tensor,
    w_BTJ: Tensor,
    queries: Documents,
    keys: Documents,
    rows: slice,
    end: int,
    slots: int,
) -> Tensor:
    """Run `choose_keys` for some rows among the keys before `end`, a tile of keys at a time."""
    q_BTJX, w_BTJ = q_BTJX[:, rows], w_BTJ[:, rows]
    best_BTC = wide(w_BTJ.new_empty(0)).new_full((*w_BTJ.shape[:2], slots), float("-inf"))
    number_BTC = torch.full_like(best_BTC, -1, dtype=torch.int32)
    for first in range(0, end, KEYS):
        cols = slice(first, min(first + KEYS, end))
        scores_BTS = tile_scores(q_BTJX, k_BSX[:, cols], w_BTJ)
        hidden_BTS = ~document_mask(queries, keys, rows, cols)[:, 0]
        # The best so far come first: numbers stay in ascending order.
        scores_BTY = torch.cat((best_BTC, scores_BTS.masked_fill_(hidden_BTS, -torch.inf)), dim=-1)
        del scores_BTS, hidden_BTS
        number_S = torch.arange(cols.start, cols.stop, dtype=torch.int32, device=k_BSX.device)
        number_S = number_S.expand(*best_BTC.shape[:2], -1)
        number_BTY = torch.cat((number_BTC, number_S), dim=-1)
        best_BTC, number_BTC = _best(scores_BTY, number_BTY, slots)
        del scores_BTY, number_BTY  # before the next tile is made
    return number_BTC


def _best(scores_BTY: Tensor, number_BTY: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return the `slots` largest scores and their numbers, in order; -inf and -1 in the rest."""
    taken_BTY = _taken(scores_BTY, slots)
    # Place of each taken one; the others go to one slot too many, which is cut off.
    place_BTY = taken_BTY.cumsum(-1).sub_(1).masked_fill_(taken_BTY.logical_not_(), slots)
    shape = (*scores_BTY.shape[:-1], slots + 1)
    best = scores_BTY.new_full(shape, -torch.inf).scatter_(-1, place_BTY, scores_BTY)
    number = number_BTY.new_full(shape, -1).scatter_(-1, place_BTY, number_BTY)
    return best[..., :slots], number[..., :slots]


def _taken(scores_BTY: Tensor, slots: int) -> Tensor:
    """Return bool: the `slots` largest scores above -inf, of equal ones the last; branch-free.

    A sort would order ties as it likes, and the indices of topk are such a sort's.
    """
    least_BT1 = scores_BTY.topk(slots, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_BTY = scores_BTY > least_BT1
    equal_BTY = (scores_BTY == least_BT1).logical_and_(scores_BTY > -torch.inf)
    free_BT1 = slots - above_BTY.sum(-1, keepdim=True, dtype=torch.int32)
    number_BTY = equal_BTY.cumsum(-1, dtype=torch.int32)
    late_BTY = number_BTY > number_BTY[..., -1:] - free_BT1
    return above_BTY.logical_or_(late_BTY.logical_and_(equal_BTY))
