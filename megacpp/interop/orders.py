"""Orders of rows: index `[R]` of each row of a tensor of theirs in our rows, stacked; -1: zeros.

Rows are all dims but the last one, flattened. Legend: R rows of theirs, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megacpp.config.model import ModelConfig

Order = Callable[[ModelConfig, Sequence[int]], Tensor]  # (model, rows of each part) -> [R]


def halves(model: ModelConfig, rows: Sequence[int]) -> Tensor:
    """Return heads of whose R rotated rows, the first, pairs (2i, 2i + 1) become (i, i + R / 2)."""
    dim = model.attention.head_dim
    one = _with_still(dim, int(dim * model.attention.rope_fraction), first=True)
    return _by_head(one, sum(rows), dim)


def gated_queries(model: ModelConfig, rows: Sequence[int]) -> Tensor:
    """Return `halves`, each head followed by its gate: zeros, so 1/2, where queries are alone."""
    dim, queries = model.attention.head_dim, rows[0]
    index_NH = halves(model, (queries,)).view(-1, dim)
    gate_NH = torch.arange(queries, sum(rows)).view(-1, dim)
    if len(rows) == 1:
        gate_NH = torch.full_like(index_NH, -1)
    return torch.cat((index_NH, gate_NH), 1).flatten()


def rotated_last(model: ModelConfig, rows: Sequence[int]) -> Tensor:
    """Return heads of MLA whose rotated rows, the last ones, turn in halves."""
    a = model.attention
    dim = a.qk_nope_head_dim + a.qk_rope_head_dim
    return _by_head(_with_still(dim, a.qk_rope_head_dim, first=False), sum(rows), dim)


def rotated_key(model: ModelConfig, rows: Sequence[int]) -> Tensor:
    """Return latent and shared key of MLA, whose rotated rows turn in halves."""
    return _with_still(sum(rows), model.attention.qk_rope_head_dim, first=False)


def index_pairs(model: ModelConfig, rows: Sequence[int]) -> Tensor:
    """Return heads of an indexer whose rotated rows, the first ones, turn in pairs, not halves."""
    dim = model.attention.sparse.head_dim
    one = _with_still(dim, model.attention.qk_rope_head_dim, first=True).argsort()
    return _by_head(one, sum(rows), dim)


ORDERS: Mapping[str, Order] = {
    order.__name__: order
    for order in (halves, gated_queries, rotated_last, rotated_key, index_pairs)
}


def _halved(dim: int) -> Tensor:
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))


def _with_still(dim: int, rotated: int, first: bool) -> Tensor:
    """Return `dim` rows of which the first or last `rotated` turn in halves."""
    still, start = dim - rotated, 0 if first else dim - rotated
    parts = [_halved(rotated) + start, torch.arange(still) + (rotated if first else 0)]
    return torch.cat(parts if first else parts[::-1])


def _by_head(one: Tensor, rows: int, dim: int) -> Tensor:
    """Return the order of every head, given that of one of `dim` rows `[H]`."""
    return (torch.arange(0, rows, dim)[:, None] + one).flatten()


def grouped(rows: Sequence[int], groups: int) -> Tensor:
    """Return equal parts of every stacked tensor, group by group."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    parts = [
        start + torch.arange(size).view(groups, -1)
        for start, size in zip(starts, rows, strict=True)
    ]
    return torch.cat(parts, 1).flatten()
