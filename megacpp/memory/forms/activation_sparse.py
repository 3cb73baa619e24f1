"""What sparse A blocks keep for the backward, beside what attention does; see activation_blocks.py.

The choice itself is noted with the documents of the batch (batch.py), whoever attends to it.

Legend: n tokens of this rank, J indexer heads, X indexer head dim, Q latent of queries, R rotated
dim of MLA.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.memory.forms.activation_blocks import attention
from megacpp.memory.forms.activation_share import Kept, Pieces, Share
from megacpp.model.regions import BLOCK


def shares(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """A layer that attends to another's choice."""
    yield from attention(own, pieces)
    a, everywhere = own.config.model.attention, own.rows * own.row
    expands = a.kind == "mla" and not pieces & {"block", "mla_kv"}
    if own.cp > 1 and own.chunks == 2 and own.rows == 1 and expands:
        # Chunks are put in the order of the row, latents apart from what is rotated.
        yield "gathered", -everywhere * a.qk_rope_head_dim, own.compute


def index(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """A layer with an indexer, whose loss leaves gradients instead of what they are made of."""
    yield from shares(own, pieces)
    if pieces >= BLOCK:
        return
    a, n, s, w = own.config.model.attention, own.tokens, own.compute, own.wide
    J, X, everywhere = a.sparse.num_heads, a.sparse.head_dim, own.rows * own.row
    if normed_again(own):
        yield "indexer", n * a.q_lora_rank, s
    yield "indexer", n * (X + 2), w  # a key before its norm, its mean and deviation
    yield "indexer", n * J * X, s  # gradients
    yield "indexer", everywhere * X, s
    yield "indexer", n * J, w
    copied = a.kind == "mla" and own.rows > 1 and "mla_kv" not in pieces
    if own.cp > 1 and own.chunks == 1 and not copied:
        yield "gathered", everywhere * X, s  # one tensor with what attention keeps


def normed_again(own: Share) -> bool:
    """The latent of queries is normed for the indexer alone, without a gradient."""
    a = own.config.model.attention
    return a.kind == "mla" and a.q_lora_rank > 0
