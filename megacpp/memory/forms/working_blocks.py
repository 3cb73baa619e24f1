"""Working set of an F mixer, without the frame around it (working_frame.py).

Legend: n tokens of this rank, D model, F hidden units of this rank; s bytes of a number in compute.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_frame import given, gradient_bytes, reads


def feed_forward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """F: gate and up, their product, its projection."""
    mlp = own.config.model.mlp
    gated, hidden = mlp.activation == "swiglu", mlp.hidden_dim // own.tp
    yield from gated_forward(own, hidden, gated, own.tokens)


def feed_forward_back(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """F: the product's gradient, then the projections'."""
    mlp = own.config.model.mlp
    gated, hidden = mlp.activation == "swiglu", mlp.hidden_dim // own.tp
    D, s, n = own.config.model.dim, own.compute, own.tokens
    unit, x, dy = n * hidden * s, n * D * s, given(own, "F")
    w2, w1 = gradient_bytes(own, "F", "w2"), gradient_bytes(own, "F", "w1")
    yield from gated_backward(own, unit, gated, dy, w2, asked="mlp" in pieces)
    narrow = 0 if own.parallel else hidden * D * s
    if gated:
        yield Moment("into hidden", 2 * unit + x + narrow, w2 + w1)
        yield Moment("into other hidden", unit + 2 * x + narrow, w2 + 2 * w1)
        yield Moment("sum of gradients", 3 * x - reads(own, "F"), w2 + 2 * w1)  # nobody reads
    else:
        yield Moment("into hidden", unit + x + narrow, w2 + w1)


def gated_forward(own: Share, hidden: int, gated: bool, tokens: int) -> Iterator[Moment]:
    """Both projections, act(gate) up, and the projection back."""
    unit, out = tokens * hidden * own.compute, tokens * own.config.model.dim * own.compute
    kept = (2 if gated else 1) * unit
    yield Moment("product of hidden units", kept + 2 * unit)
    yield Moment("out of hidden units", kept + unit + out)


def gated_backward(
    own: Share, unit: int, gated: bool, dy: int, gradients: int, asked: bool
) -> Iterator[Moment]:
    """Of megacpp/kernels/gated_linear.py: first its weight, then its units."""
    kept, narrow = (2 if gated else 1) * unit, 0 if own.parallel else gradients // own.wide
    first = dy + kept + 2 * unit + narrow * own.compute
    yield Moment("gradient of w2", first, gradients, asked)
    # gate, up, active, dh, dh up, dgate; without up: h, active, dh times 2 active, dh
    last = dy + (6 if gated else 4) * unit
    yield Moment("gradient of hidden units", last, gradients, asked)
