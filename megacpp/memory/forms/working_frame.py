"""Bytes of norms, and of gradients of a block's weights; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.fp8 import kept_product
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.traced import traced_kept
from megacpp.memory.forms.weights import Weight, weights


def norm_forward(own: Share) -> Moment:
    """Return the moment of a norm's forward: x and x / rms widened, the result, 1 / rms."""
    x, cast = own.stream * own.config.model.dim * own.wide, own.residual < own.wide
    return Moment("norm", x * (3 if cast else 2) + own.stream * own.wide)


def norm_back(own: Share, rms: int) -> Moment:
    """Return the moment of a norm's backward: dy as it came and widened, x widened, products, dx.

    Args:
        own: sizes of the rank.
        rms: bytes of the norm's factors, one or more per token.
    """
    D, x = own.config.model.dim, own.stream * own.config.model.dim
    casts = (own.residual < own.wide) + (own.compute < own.wide)
    wide = own.wide * (norm_products(own) + 1 + casts)
    return Moment("norm", rms + x * (own.compute + wide), D * own.wide, fresh=D * own.wide)


def norm_products(own: Share) -> int:
    """Return the products that a norm's backward stores beside dx: x / rms, dy x / rms.

    A GPU's kernel stores neither.
    """
    return 0 if own.on_gpu else 2


def given(own: Share, letter: str) -> int:
    """Return bytes of a mixer's output gradient; 0: it is the residual stream's own."""
    one = own.config.model.mhc.streams == 1
    if one and own.tp == 1 and own.residual == own.compute:
        return 0
    if one and letter == "E" and own.residual == own.compute:
        return 0
    return (own.stream if letter == "E" else own.tokens) * own.config.model.dim * own.compute


def copied(own: Share) -> int:
    """Return 1 if a gather or scatter along tokens makes a copy, as for several rows; else 0."""
    return 1 if own.rows > 1 else 0


def kept_of_block(own: Share, kind: str, pieces: Pieces) -> int:
    """Return bytes that a block saves for its backward, without copies of weights."""
    parts = traced_kept(own, kind, pieces)
    kept = sum(count * each for group, count, each in parts if group != "weights")
    return kept + kept_product(own, kind[0], pieces)


def whole(own: Share, weight: Weight) -> int:
    """Return the elements of a gathered weight: cut over `tp` and `ep` alone."""
    numbers = 1
    for size in weight.shape:
        numbers *= size
    if weight.experts:
        return numbers // own.config.mesh.ep
    return numbers // own.tp if weight.tp is not None else numbers


def gradient_bytes(own: Share, letter: str, *names: str) -> int:
    """Return bytes of a mixer's weight gradients, or of those named, as a backward leaves them."""
    return sum(size for name, size in _gradients(own, letter) if not names or name in names)


def largest_gradient(own: Share, letter: str) -> int:
    """Return bytes of the largest gradient of one weight of a mixer."""
    return max((size for _, size in _gradients(own, letter)), default=0)


def _gradients(own: Share, letter: str) -> Iterator[tuple[str, int]]:
    narrow = own.compute if own.parallel else own.wide
    for w in weights(own.config.model, letter, own.config.recompute.compress)[1:]:
        if not (w.folded or w.name.startswith("connection.")):
            yield w.name, whole(own, w) * (own.wide if w.wide else narrow)
