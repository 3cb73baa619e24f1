"""Working sets outside of the blocks: embedding, last norm, head, and received streams.

Legend: n tokens of this rank, t those of the residual stream, D model, v words of this rank, r
tokens of a chunk; s bytes of an element in compute, w of one never narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.memory.forms.activation_share import INDEX, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_frame import copied, norm_back, norm_forward

FEWEST_ROWS = 128  # of a chunk of the head (megacpp/kernels/linear_cross_entropy/chunked.py)
PRODUCT_BYTES = 2**26  # of the weight's gradient on a GPU at a time (there too)


def embed(own: Share) -> Iterator[Moment]:
    """Yield moments of the look-up; of a cut vocabulary also zeros for other ranks' words."""
    t, n = _stream(own), own.tokens * own.config.model.dim * own.residual
    words = own.tokens * (INDEX + 1) if own.tp > 1 else 0
    if own.tp == 1:
        yield Moment("embedding", t)
        return
    yield Moment("own words", words + 2 * n)
    yield Moment("scatter", words + n * (1 + copied(own)) + t)


def embed_back(own: Share) -> Iterator[Moment]:
    """Yield moments of the table's gradient; of a tied one also the sum with the head's."""
    model, t = own.config.model, _stream(own)
    n, words = own.tokens * model.dim * own.residual, own.tokens * (INDEX + 1)
    table = _words(own) * model.dim * (own.compute if own.parallel else own.wide)
    if own.tp > 1:
        yield Moment("gather", t + words + n * (1 + copied(own)))
        yield Moment("own words", words + 2 * n)
    yield Moment("embedding", (n + words) if own.tp > 1 else t, table)
    if model.tie_embeddings:
        yield Moment("tied gradients", table, table)


def spread(own: Share) -> Iterator[Moment]:
    """Yield the moment of copying one stream to all."""
    yield Moment("streams", _streams(own))


def spread_back(own: Share) -> Iterator[Moment]:
    """Yield the moment of summing the streams' gradients."""
    yield Moment("streams", _streams(own) + _stream(own))


def collapse(own: Share) -> Iterator[Moment]:
    """Yield the moment of the mean or sum of the streams."""
    yield Moment("streams", _stream(own))


def collapse_back(own: Share) -> Iterator[Moment]:
    """Yield the moment of copying one gradient to all streams."""
    yield Moment("streams", _streams(own) + _stream(own))


def last_norm(own: Share) -> Iterator[Moment]:
    """Yield the moment of the norm behind the last block."""
    yield norm_forward(own)


def last_norm_back(own: Share) -> Iterator[Moment]:
    """Yield the moment of the last norm's backward, from the head's gradient."""
    mtp = own.config.model.mtp
    waits = 0
    if mtp.depths and not mtp.detach_trunk:  # what it gives back is yet to be added
        waits = _stream(own) if mtp.hidden == "pre_norm" else _stream_in(own) * (own.tp > 1)
    yield norm_back(own, 3 * own.stream * own.wide).more(waits)


def head(own: Share) -> Iterator[Moment]:
    """Yield moments of chunks of logits with both gradients; then of tokens further ahead."""
    model, n = own.config.model, own.tokens
    depths, x = model.mtp.depths, n * model.dim * own.compute
    cut, made, tied = own.tp > 1, _made(own), model.tie_embeddings
    for moment in _loss(own, n, True):
        yield moment.more(depths * x * cut)
    if depths:
        for moment in _loss(own, depths * n, not model.mtp.detach_head):
            yield moment.more(x * (1 + cut) + made * tied, made * (not tied))


def _loss(own: Share, n: int, learns: bool) -> Iterator[Moment]:
    """Yield moments of one loss call for n tokens.

    Triton's kernels store no logits except the product, which they change in place.
    """
    model, s, w = own.config.model, own.compute, own.wide
    v, D = _words(own), model.dim
    rows = chunk_rows(n, D, v)
    tied = model.tie_embeddings
    made = _made(own) * learns
    # which tokens are valid, loss and log-sum of each; the weight's gradient
    held = n * (1 + 2 * w) + n * D * s * (2 if own.tp > 1 else 1) + v * D * w * learns
    fused = own.by("cross_entropy") == "triton"
    logits = rows * v * (s if fused else w + (s if s < w else 0))
    if own.tp > 1:
        x = n * D * s
        yield Moment("gather", x * (1 + copied(own)))
    slope = rows * v * w if model.logit_softcap is not None and not fused else 0
    # of each token of a chunk its label in place and where it is, statistics, factors
    yield Moment("logits", held + logits + slope + rows * (2 * INDEX + 6 * w))
    if s < w and learns:  # what the weight's gradient is made of is widened
        widened, g = logits + rows * (D + 4) * w, rows * (v * s + 4 * w)
        product = g + product_bytes(v * D * w, D * w) if own.on_gpu else widened
        yield Moment("products", held + product)
    if own.parallel and s < w and learns:
        yield Moment("weight gradient", held + made * tied, made * (not tied))


def head_back(own: Share) -> Iterator[Moment]:
    """Yield moments of scaling the forward's gradients, and of returning the input's."""
    model, s = own.config.model, own.compute
    x, made, tied = own.tokens * model.dim * s, _made(own), model.tie_embeddings
    back = x * copied(own) + _stream_in(own) if own.tp > 1 else 0
    if depths := model.mtp.depths:  # those further ahead first; sums of both are a third
        x += depths * x
        back *= depths
        if not model.mtp.detach_head:
            sums = 3 * made
            yield Moment("sums of gradients", x + sums * tied, sums * (not tied))
    yield Moment("gradients", x + back + made * tied, made * (not tied))


def copy(own: Share) -> Iterator[Moment]:
    """Yield nothing: a last stage's embedding runs no operators by itself."""
    return iter(())


def _made(own: Share) -> int:
    """Return bytes of the head weight's gradient."""
    return _words(own) * own.config.model.dim * (own.compute if own.parallel else own.wide)


def received(own: Share) -> Iterator[Moment]:
    """Yield the moment of the residual stream from another stage, or of its gradient."""
    yield Moment("received", _streams(own))


def product_bytes(whole: int, word: int) -> int:
    """Return bytes of a weight gradient that a GPU makes at a time.

    Source: `accumulate` of megacpp/kernels/linear_cross_entropy/chunked.py.
    """
    return min(whole, max(1, PRODUCT_BYTES // word) * word)


def chunk_rows(tokens: int, dim: int, words: int) -> int:
    """Return the tokens of a chunk of the head.

    Source: `chunk_rows` of megacpp/kernels/linear_cross_entropy/chunked.py.
    """
    wanted = max(FEWEST_ROWS, -(-tokens * dim // words))
    return min(max(1, tokens), 1 << (wanted - 1).bit_length())


def _words(own: Share) -> int:
    return own.config.model.vocab_size // own.tp


def _stream(own: Share) -> int:
    return own.stream * own.config.model.dim * own.residual


def _streams(own: Share) -> int:
    return own.config.model.mhc.streams * _stream(own)


def _stream_in(own: Share) -> int:
    return own.stream * own.config.model.dim * own.compute
