"""Stand-ins that run the chunks at the ends of a loop, which allocate as much as all others.

Each is named in `FEW` beside what it stands for; parallel/simulate/stand_ins.py puts it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.attention.softcap import block_starts
from megacpp.kernels.hyper_connections.reference import token_parts
from megacpp.kernels.linear_cross_entropy.chunked import (
    ChunkFunction,
    ShardStatistics,
    chunk_function,
    token_spans,
)
from megacpp.kernels.m2rnn.chunks import ChunkPlan
from megacpp.kernels.sparse_attention.indexer import head_groups, query_blocks
from megacpp.kernels.sparse_attention.indexer_loss import each_head


class _Ends(list[slice]):
    """List as long as all chunks of a row, whose iteration visits those at its ends."""

    def __iter__(self) -> Iterator[slice]:
        last = max(2, len(self) - 2)
        return iter([*self[:2], *self[last:]])


@dataclass(frozen=True, eq=False)
class FewChunks(ChunkPlan):
    """Stand-in for `ChunkPlan` in which each chunk writes over the memory of the one before."""

    def spans(self) -> list[slice]:
        """Return all chunks of a row; iteration visits the first two and the last two."""
        return _Ends(super().spans())


def ends_of_queries(tokens: int) -> list[slice]:
    """Stand-in for `query_blocks`: the first block, and the last, which is the fullest."""
    blocks = query_blocks(tokens)
    return [*blocks[:-1][:1], blocks[-1]]


def ends_of_blocks(tokens: int) -> list[int]:
    """Stand-in for `block_starts`: the first block, and the last two, which see most keys."""
    starts = block_starts(tokens)
    return [*starts[:-2][:1], *starts[-2:]]


def few_groups(q_BTJX: Tensor, k_BSX: Tensor) -> list[slice]:
    """Stand-in for `head_groups`: the first two, which are alive together, and the last."""
    groups = head_groups(q_BTJX, k_BSX)
    return [*groups[:2], *groups[2:][-1:]]


def few_parts(x_SnD: Tensor) -> list[slice]:
    """Stand-in for `token_parts`: the first two, which are alive together, and the last."""
    parts = token_parts(x_SnD)
    return [*parts[:2], *parts[2:][-1:]]


def few_heads(heads: int) -> list[int]:
    """Stand-in for `each_head`: the first and the last."""
    return [*range(heads)[:1], *range(1, heads)[-1:]]


def ends_of_tokens(tokens: int, rows: int) -> list[slice]:
    """Stand-in for `token_spans`: the two chunks at each end, and all others as one."""
    spans = token_spans(tokens, rows)
    if len(spans) < 6:
        return spans
    return [*spans[:2], slice(spans[2].start, spans[-2].start), *spans[-2:]]


def few_logits(backend: str) -> ChunkFunction:
    """Stand-in for `chunk_function`: chunks longer than the first one have statistics alone."""
    every, rows = chunk_function(backend), list[int]()

    def chunk(x_nD: Tensor, *rest: Any) -> tuple[ShardStatistics, Tensor | None]:
        rows.append(len(x_nD))
        if rows[-1] <= rows[0]:
            return every(x_nD, *rest)
        dtype = torch.promote_types(x_nD.dtype, torch.float32)
        return ShardStatistics(*(x_nD.new_empty(rows[-1], dtype=dtype) for _ in range(3))), None

    return chunk  # type: ignore[return-value]


# Original and stand-in.
FEW = (
    (ChunkPlan, FewChunks),
    (query_blocks, ends_of_queries),
    (block_starts, ends_of_blocks),
    (head_groups, few_groups),
    (token_parts, few_parts),
    (each_head, few_heads),
    (token_spans, ends_of_tokens),
    (chunk_function, few_logits),
)
