"""Stand-ins that run the chunks at the ends of a loop, which allocate as much as all others.

Each is named in `FEW` beside what it stands for; parallel/simulate/stand_ins.py puts it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
from megacpp.memory.repeats import standing_for

T = TypeVar("T")


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


class _Few(list[T]):
    """List of a loop's items that says in its iteration for how many items each one runs."""

    def __init__(self, every: Sequence[T], kept: Sequence[int], times: Sequence[float]) -> None:
        super().__init__(every[number] for number in kept)
        self._times = times

    def __iter__(self) -> Iterator[T]:
        for item, times in zip(super().__iter__(), self._times, strict=True):
            with standing_for(times):
                yield item


def _growing(every: Sequence[T], last: int) -> list[T]:
    """Return the first and the `last` items of a loop whose work grows evenly."""
    count = len(every)
    if count <= last + 1:
        return [*every]
    # As many as all together, and of the same mean place.
    each = count * (count - 1) / (2 * last * count - last * (last + 1))
    times = [count - last * each, *[each] * last]
    return _Few(every, [0, *range(count - last, count)], times)


def _equal(every: Sequence[T]) -> list[T]:
    """Return the first two of equal items, alive together, and the last, a part of one."""
    count = len(every)
    if count <= 3:
        return [*every]
    return _Few(every, [0, 1, count - 1], [(count - 1) / 2] * 2 + [1.0])


def ends_of_queries(tokens: int) -> list[slice]:
    """Stand-in for `query_blocks`: the first block, and the last, which is the fullest."""
    return _growing(query_blocks(tokens), 1)


def ends_of_blocks(tokens: int) -> list[int]:
    """Stand-in for `block_starts`: the first block, and the last two, which see most keys."""
    return _growing(block_starts(tokens), 2)


def few_groups(q_BTJX: Tensor, k_BSX: Tensor) -> list[slice]:
    """Stand-in for `head_groups`."""
    return _equal(head_groups(q_BTJX, k_BSX))


def few_parts(x_SnD: Tensor) -> list[slice]:
    """Stand-in for `token_parts`."""
    return _equal(token_parts(x_SnD))


def few_heads(heads: int) -> list[int]:
    """Stand-in for `each_head`: the first and the last."""
    return _growing(range(heads), 1)


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
