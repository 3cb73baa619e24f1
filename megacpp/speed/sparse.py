"""Sparse attention and its indexer as work of the time model; no torch import.

Both take a block of queries at a time, in fp32. A trace runs the blocks at the ends of a row alone
(parallel/simulate/few_chunks.py), so what the others do in passes and launches is added here.
Source: megacpp/kernels/sparse_attention.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megacpp.config.schema import ModelConfig
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.speed.operators import Operator, Passes, Product

QUERIES, INDEXED = 128, 256  # queries of a block of attention, and of the indexer
TRACED = (3, 2)  # blocks of each that a trace runs
# Element-wise reads and writes of a logit in a block's forward and backward, and bytes of a dim of
# keys and values, which each block converts to fp32 and whose gradients it adds up.
LOGIT_PASSES = (10, 15)
KEY_BYTES, GRADIENT_BYTES = 6, 12
# Where keys are chosen and in the loss: reads and writes of a head's score, and of their sum.
SCORE_PASSES, SUM_PASSES = (3, 9), (47, 16)
# In the loss: of an attention head's logit, of chosen keys or of all that are visible.
CHOSEN_PASSES, VISIBLE_PASSES = 19, 10
# Operators of a block: forward, backward; of an indexer: its loss, a head's part of it, a choice
# among a tile of keys.
ISSUED, INDEXER_ISSUED = (22, 30), (57, 8, 36)
KEYS = 1024  # of a tile


class SparseWork(NamedTuple):
    """Forward and backward of a mixer's attention."""

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]


def attention_work(model: ModelConfig, own: LocalShapes) -> SparseWork:
    """Return the work of attention to chosen keys; other keys are multiplied and then masked."""
    heads, groups, query, value = _heads(model, own)
    keys, blocks = _keys(own), math.ceil(own.here / QUERIES)
    rows, count = math.ceil(own.here / blocks) * heads // groups, own.rows * groups * blocks
    n, left = max(1, round(keys)), max(0, blocks - TRACED[0])

    def product(m: int, n: int, k: int) -> Product:
        return Product(m, n, k, count, "TN", "fp32")

    forward = (product(rows, n, query), product(rows, value, n))
    backward = (
        *(product(rows, n, query), product(n, value, rows), product(rows, n, value)),
        *(product(n, query, rows), product(rows, query, n)),
    )
    logits = 4.0 * own.rows * heads * own.here * keys * left / blocks
    dims = own.rows * groups * keys * left  # of each dim of keys or values, over all blocks
    width = (query + value, 2 * query + value)
    moved = [
        times * logits + KEY_BYTES * dims * w for times, w in zip(LOGIT_PASSES, width, strict=True)
    ]
    moved[1] += GRADIENT_BYTES * dims * (query + value)
    issued = left * ISSUED[0], left * ISSUED[1]
    passes = [Passes(m, n) for m, n in zip(moved, issued, strict=True)] if left else []
    return SparseWork((*forward, *passes[:1]), (*backward, *passes[1:]))


def indexer_work(model: ModelConfig, own: LocalShapes) -> SparseWork:
    """Return the work of an indexer's choice and of its loss, which makes gradients forward.

    A rank of tp has all of the indexer and all tokens.
    """
    sparse = model.attention.sparse
    heads, width = sparse.num_heads, sparse.head_dim
    attending, _, query, _ = _heads(model, own)
    keys, blocks = _keys(own), math.ceil(own.here / INDEXED)
    tokens, count = math.ceil(own.here / blocks), own.rows * blocks
    n, left = max(1, round(keys)), max(0, blocks - TRACED[1])
    chooses = sparse.stage != "dense"

    def product(m: int, n: int, k: int, count: int = count) -> Product:
        return Product(m, n, k, count, "TN", "fp32")

    scores = product(tokens * heads, n, width)
    forward = [scores] * (2 + chooses)  # the loss makes them, and its gradient once more
    forward += [product(tokens * heads, width, n), product(n, width, tokens * heads)]
    forward += [product(tokens, n, query, count * attending)]  # probabilities, head by head
    if not left:
        return SparseWork(tuple(forward), ())
    moved = keys * (heads * SCORE_PASSES[1] + SUM_PASSES[1])
    if chooses:
        moved += keys * (heads * SCORE_PASSES[0] + SUM_PASSES[0] + attending)
        moved += attending * CHOSEN_PASSES * min(keys, sparse.top_k)
    else:
        moved += attending * VISIBLE_PASSES * keys
    moved *= 4.0 * own.rows * own.here * left / blocks
    loss, head, tile = INDEXER_ISSUED
    issued = left * (loss + head * attending + chooses * round(tile * (keys / KEYS + 0.5)))
    return SparseWork((*forward, Passes(moved, issued)), ())


def _keys(own: LocalShapes) -> float:
    """Return the keys of a query: those before it, or all of a row that is spread over ranks."""
    return own.row / 2 if own.cp == 1 else float(own.row)


def _heads(model: ModelConfig, own: LocalShapes) -> tuple[int, int, int, int]:
    """Return query heads and key heads of the rank, dims of a query head and of a value head."""
    a = model.attention
    heads = max(1, a.num_heads // own.tp)
    if a.kind == "gqa":
        return heads, max(1, a.num_kv_heads // own.tp), a.head_dim, a.head_dim
    return heads, heads, a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim
