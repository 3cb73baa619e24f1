"""Attention by torch's flex kernels: documents, soft cap, grouped heads and unequal head dims.

`torch.nn.attention.flex_attention` compiles one Triton kernel a direction around two functions:
which keys a query sees, and what a score becomes. Blocks of 128 keys of which a block of 128
queries sees nothing are skipped: the table of blocks is made once a batch, from the first and last
document of every block, and nothing of size `[T, S]` exists.

What it takes (torch 2.11 to 2.13; torch/_inductor/kernel/flex/flex_attention.py): CUDA for training
(on a CPU it has no backward), any two head dims of at least 16 each, query heads a multiple of
key/value heads, one dtype for q, k and v. For backward it keeps q, k, v, the output and one fp32
number per query and head.

Legend: B rows, T query tokens, S key tokens, N query heads, K key/value heads, H query/key head
dim, V value head dim, Q blocks of queries, C blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from megacpp.model.documents import Documents
from megacpp.torch_extras import autocast_dtype

BLOCK = 128  # tokens of a block, of queries and of keys: flex's default
PLACES = 2**31  # more than a row has tokens
PAST = 2**62  # past the last token of any document; a power of two, because padding goes by floats

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    queries: Documents,
    keys: Documents,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return attention `[B, T, N, V]` of queries to the keys of their documents that aren't later.

    Queries and keys may be different tokens of the same rows, in any order.

    Args: as `causal_attention` (causal.py), and
        queries: documents of the queries.
    """
    q, k, v = (x.to(autocast_dtype(x) or x.dtype).transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKV))
    o_BNTV = fused()(
        q,
        k,
        v,
        score_mod=None if softcap is None else capped(softcap),
        block_mask=block_mask(queries, keys),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return o_BNTV.transpose(1, 2)


def fused() -> Any:
    """Return flex_attention, compiled; inside of a compiled block the block's compiler does it."""
    return flex.flex_attention if torch.compiler.is_compiling() else _compiled()


@functools.cache
def _compiled() -> Any:
    # Rows of a run have one length: kernels of their own for every shape.
    return torch.compile(flex.flex_attention, dynamic=False)


@functools.cache
def capped(softcap: float) -> ScoreMod:
    """Return a score function that applies a soft cap to scaled scores."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def block_mask(queries: Documents, keys: Documents) -> BlockMask:
    """Return the mask of FlexAttention by blocks and tokens, made once a batch."""
    other = None if keys is queries else keys  # a memo must not refer to itself
    return queries.memo(("flex_mask", other), lambda: _block_mask(queries, keys))


def _block_mask(queries: Documents, keys: Documents) -> BlockMask:
    whole = _whole(queries) and _whole(keys)
    rows = slice(1) if whole else slice(None)
    (ids_BT, places_BT), (ids_BS, places_BS) = (_places(docs, rows) for docs in (queries, keys))
    of_queries, of_keys, window = (ids_BT, places_BT), (ids_BS, places_BS), queries.window
    some_BQC, all_BQC = block_table(of_queries, of_keys, window or PLACES)
    part_BQC = some_BQC & ~all_BQC
    num_part, part = _ordered(part_BQC)
    num_all, every = _ordered(all_BQC)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row = 0 if whole else b
        same = ids_BT[row, q] == ids_BS[row, kv]
        seen = same & (places_BT[row, q] >= places_BS[row, kv])
        if window:
            seen = seen & (places_BT[row, q] < places_BS[row, kv] + window)
        return seen

    return BlockMask.from_kv_blocks(
        num_part,
        part,
        num_all,
        every,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(ids_BT.shape[1], ids_BS.shape[1]),
    )


def block_table(
    queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], window: int = PLACES
) -> tuple[Tensor, Tensor]:
    """Return bool `[B, Q, C]` twice: blocks in which a query may see a key, and where all see all.

    Computed from the least and the greatest document and position of every block: the first may
    hold blocks too many (of tokens that aren't in order), the second too few; no [T, S] is made.

    Args:
        queries, keys: int32 documents and, within them, positions.
        window: tokens that a query sees, itself included.
    """
    (q_ids, q_tokens), (k_ids, k_tokens) = _edges(*queries, 2), _edges(*keys, 1)
    meets_BQC = (q_ids.last >= k_ids.first) & (q_ids.first <= k_ids.last)
    some_BQC = meets_BQC & (q_tokens.last >= k_tokens.first)
    one_BQC = (q_ids.first == q_ids.last) & (k_ids.first == k_ids.last) & meets_BQC
    all_BQC = one_BQC & (q_tokens.first >= k_tokens.last)
    if window < PLACES:  # in a block of one document positions differ as places do
        some_BQC &= q_tokens.first - k_tokens.last < window
        all_BQC &= q_tokens.last - k_tokens.first < window
    if queries[0].shape[1] % BLOCK:
        all_BQC[:, -1] = False
    if keys[0].shape[1] % BLOCK:
        all_BQC[:, :, -1] = False
    return some_BQC, all_BQC


class _Edges(NamedTuple):
    """Least and greatest value of every block."""

    first: Tensor
    last: Tensor


def _edges(ids_BT: Tensor, places_BT: Tensor, dim: int) -> tuple[_Edges, _Edges]:
    """Return the edges of documents, and of tokens of the row; blocks precede a new dim `dim`."""
    found = []
    ids_BT = ids_BT.to(torch.int64)
    for values_BT in (ids_BT, ids_BT * PLACES + places_BT):
        missing = -values_BT.shape[1] % BLOCK
        least, most = (
            F.pad(values_BT, (0, missing), value=fill).unflatten(1, (-1, BLOCK))
            for fill in (PAST, -PAST)
        )
        found.append(_Edges(least.amin(2).unsqueeze(dim), most.amax(2).unsqueeze(dim)))
    return found[0], found[1]


def _ordered(table_BQC: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 `[B, 1, Q]` and `[B, 1, Q, C]`: number of key blocks, and these first."""
    order_BQC = torch.argsort(table_BQC.to(torch.int8), dim=-1, descending=True, stable=True)
    num_BQ = table_BQC.sum(-1, dtype=torch.int32)
    return num_BQ[:, None], order_BQC.to(torch.int32)[:, None].contiguous()


def _places(docs: Documents, rows: slice) -> tuple[Tensor, Tensor]:
    """Return int32 documents and positions, for the scores of partly seen blocks."""
    ids_BT, places_BT = docs.ids_BT[rows], docs.positions_BT[rows]
    return ids_BT.to(torch.int32).contiguous(), places_BT.to(torch.int32).contiguous()


def _whole(docs: Documents) -> bool:
    """Return whether every row, of which these may be a part, is one document."""
    return docs.whole or (docs.row is not None and docs.row.whole)
