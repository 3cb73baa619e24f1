"""Saved activations of hashed n-grams and of token order prediction."""

from __future__ import annotations

from collections.abc import Iterable

from megacpp.memory.forms.activation_share import INDEX, Kept, Share, residual
from megacpp.model.sizes import ngram_width


def ngram(own: Share) -> Iterable[Kept]:
    """Yield the residual stream, ids of table rows (for cut tables with a mask), and rows."""
    tables = ngram_width(own.config.model.ngram) // own.config.model.ngram.dim
    if own.config.model.mhc.streams == 1:  # else copies of it
        yield residual(own)
    yield "rows of tables", own.tokens * tables, INDEX + (own.tp > 1)
    yield "n-grams", own.stream * ngram_width(own.config.model.ngram), own.compute


def top(own: Share) -> Iterable[Kept]:
    """Yield gradients of the head's input and of its weight, which the forward makes."""
    model = own.config.model
    weight = own.compute if own.parallel else own.wide
    yield "token order", own.tokens * model.dim, own.compute
    yield "token order", model.vocab_size // own.tp * model.dim, weight
