"""Products of sparse attention and of its indexer; no torch import.

Both take a block of queries at a time, in fp32. What they do beside is in a block's trace.
Source: megacpp/kernels/sparse_attention.
"""

from __future__ import annotations

import math

from megacpp.config.schema import ModelConfig
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.speed.operators import Product

QUERIES, INDEXED = 128, 256  # queries of a block of attention, and of the indexer


def attention_products(
    model: ModelConfig, own: LocalShapes
) -> tuple[tuple[Product, ...], tuple[Product, ...]]:
    """Return forward and backward products of attention to chosen keys; all are multiplied."""
    heads, groups, query, value = _heads(model, own)
    keys, blocks = _keys(own), math.ceil(own.here / QUERIES)
    rows, count = math.ceil(own.here / blocks) * heads // groups, own.rows * groups * blocks
    n = max(1, round(keys))

    def product(m: int, n: int, k: int) -> Product:
        return Product(m, n, k, count, "TN", "fp32")

    return (product(rows, n, query), product(rows, value, n)), (
        *(product(rows, n, query), product(n, value, rows), product(rows, n, value)),
        *(product(n, query, rows), product(rows, query, n)),
    )


def indexer_products(model: ModelConfig, own: LocalShapes) -> tuple[Product, ...]:
    """Return products of an indexer's choice and of its loss, which makes gradients forward.

    A rank of tp has all of the indexer and all tokens.
    """
    sparse = model.attention.sparse
    heads, width = sparse.num_heads, sparse.head_dim
    attending, _, query, _ = _heads(model, own)
    keys, blocks = _keys(own), math.ceil(own.here / INDEXED)
    tokens, count = math.ceil(own.here / blocks), own.rows * blocks
    n = max(1, round(keys))

    def product(m: int, n: int, k: int, count: int = count) -> Product:
        return Product(m, n, k, count, "TN", "fp32")

    scores = product(tokens * heads, n, width)
    return (
        *[scores] * (2 + (sparse.stage != "dense")),  # the loss makes them, and its gradient again
        product(tokens * heads, width, n),
        product(n, width, tokens * heads),
        product(tokens, n, query, count * attending),  # probabilities, head by head
    )


def _keys(own: LocalShapes) -> float:
    """Return the keys of a query: those before it, or all of a row that is spread over ranks."""
    return own.row / 2 if own.cp == 1 else float(own.row)


def _heads(model: ModelConfig, own: LocalShapes) -> tuple[int, int, int, int]:
    """Return query heads and key heads of the rank, dims of a query head and of a value head."""
    a = model.attention
    return max(1, a.num_heads // own.tp), max(1, a.num_key_heads // own.tp), *a.head_dims
