"""Working sets of hashed n-grams and of token order prediction.

Legend: n tokens of this rank, t those of the residual stream, D model, v words of this rank, r
tokens of a chunk, K tables or tokens ahead; s bytes of an element in compute, w of one never
narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.memory.forms.activation_share import INDEX, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_frame import copied
from megacpp.memory.forms.working_head import chunk_rows
from megacpp.model.sizes import ngram_rows, ngram_width

FARTHEST = {4: 88, 8: 709}  # tokens ahead that can weigh, by bytes (megacpp/kernels/token_order.py)


def ngram(own: Share) -> Iterator[Moment]:
    """Yield moments of hashing, the look-up, its projection, and the sum with the embedding."""
    model, n, t = own.config.model, own.tokens, own.stream
    width, s, c = ngram_width(model.ngram), own.residual, own.compute
    places = n * (width // model.ngram.dim)
    rows, here, found = places * (INDEX + (own.tp > 1)), t * width, n * width * s
    yield Moment("hash", 2 * places * INDEX + n * INDEX)
    if own.tp > 1:
        yield Moment("own rows", rows + 2 * found)
        yield Moment("scatter", rows + found * (1 + copied(own)) + here * s)
    yield Moment("look up", rows + here * s + (here * c if c < s else 0))
    yield Moment("sum", rows + here * c + t * model.dim * (c + s))


def ngram_back(own: Share) -> Iterator[Moment]:
    """Yield moments of gradients of the projection, of looked-up rows, and of the tables."""
    model, n, t = own.config.model, own.tokens, own.stream
    width, s, c = ngram_width(model.ngram), own.residual, own.compute
    store, proj = c if own.parallel else own.wide, model.dim * width
    rows = n * (width // model.ngram.dim) * (INDEX + (own.tp > 1))
    grad, here, found = t * model.dim * s, t * width, n * width * s
    cast = t * model.dim * c if c < s else 0
    yield Moment("projection", grad + cast + rows + 2 * here * c + proj * c)
    if c < s:
        yield Moment("widened", grad + rows + here * (c + s), proj * store)
    if own.tp > 1:
        yield Moment("gather", grad + rows + here * s + found * (1 + copied(own)), proj * store)
        yield Moment("own rows", grad + rows + 2 * found, proj * store)
    table = ngram_rows(model.ngram) // own.tp * model.ngram.dim
    yield Moment("tables", grad + rows + found, (proj + table) * store)


def top(own: Share) -> Iterator[Moment]:
    """Yield moments of word places in whole rows, then of chunks of logits and both gradients."""
    model, s, w, n = own.config.model, own.compute, own.wide, own.tokens
    v, D = model.vocab_size // own.tp, model.dim
    rows = chunk_rows(n, D, v)
    ahead = min(model.top.window, max(1, own.row - 1), FARTHEST[w])
    whole = own.rows * own.row * INDEX
    x = n * D * s
    if own.tp > 1:
        yield Moment("gather", x * (1 + copied(own)))
    held = 2 * whole + 2 * n * INDEX + n * w + x * (2 if own.tp > 1 else 1)
    logits = rows * v * ((w + s) if s < w else w) + (rows * D * w if s < w else 0)
    yield Moment("logits", held + rows * ahead * (INDEX + w) + logits + v * D * w)
    if own.parallel and s < w:
        yield Moment("weight gradient", held + v * D * w, v * D * s)


def top_back(own: Share) -> Iterator[Moment]:
    """Yield moments of scaling the forward's gradients, and of the sum with the head's."""
    model, s = own.config.model, own.compute
    x, t = own.tokens * model.dim * s, own.stream * model.dim * s
    made = model.vocab_size // own.tp * model.dim * (s if own.parallel else own.wide)
    if own.tp > 1:
        yield Moment("scatter", x * (1 + copied(own)) + 2 * t, made)
    yield Moment("sum", x + t * (1 if own.parallel else 2), made)
