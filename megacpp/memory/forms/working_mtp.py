"""Working sets of multi-token prediction: depth after depth, each with an A and an F block.

Legend: n tokens of this rank, t those of the residual stream, D model, K depths; s bytes of an
element in compute, w of one never narrower than fp32, r of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megacpp.blocks.mtp.plan import num_blocks
from megacpp.memory.forms import working_head
from megacpp.memory.forms.activation_share import INDEX, Kept, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.mtp import depth, looked_up, of_blocks
from megacpp.memory.forms.traced import traced_kept, traced_moments
from megacpp.memory.forms.weights import weights
from megacpp.memory.forms.working_frame import (
    gradient_bytes,
    norm_back,
    norm_forward,
    whole,
)
from megacpp.model.regions import NOTHING


def mtp(own: Share) -> Iterator[Moment]:
    """Yield moments of all depths' embeddings, of the last depth, and of the head's input."""
    K, made = own.config.model.mtp.depths, _normed(own)
    beside = made if own.config.model.mtp.hidden == "pre_norm" else 0  # else it is handed on
    for moment in working_head.embed(_rows(own, K)):
        yield moment.more(K * own.tokens * INDEX)
    for moment in _depth(own):
        yield moment.more(_before(own, K - 1) + (K - 1) * beside)
    yield Moment("all depths", _before(own, K) + K * (made + beside))


def mtp_back(own: Share) -> Iterator[Moment]:
    """Yield moments of each depth, last first, with recomputation; then of the embeddings."""
    mtp, t, D = own.config.model.mtp, own.stream, own.config.model.dim
    K, r = mtp.depths, own.residual
    of_head = K * _normed(own)  # of all depths together: views of one tensor
    block = _gradients(own)
    for k in reversed(range(K)):
        later = K - 1 - k
        made = (_pending(own) if later else 0) if mtp.shared else block * later
        # the gradient of the next token's hidden states, and those of embeddings
        waits = _before(own, k) + _normed(own) + later * t * D * r * (not mtp.detach_trunk)
        back = t * D * r if later else 0  # of what the next depth was handed
        if own.config.recompute.mtp and later:
            for moment in _depth(own):
                if moment.name != "handed on":
                    yield moment.more(waits + of_head + back, made)
        norm, *rest = _depth_back(own)
        yield norm.more(waits + of_head + back, made)
        for moment in rest:
            new = _new(own, moment.gradients) if mtp.shared and later else moment.gradients
            there = waits + (of_head if k else 0)
            yield Moment(moment.name, moment.tensors + there, made + new)
    if not mtp.detach_trunk:
        made = block * num_blocks(mtp)
        yield Moment(
            "embeddings", _normed(own) + (2 * K + 1) * t * D * r + _sum(looked_up(own)), made
        )
        for moment in working_head.embed_back(_rows(own, K)):
            yield moment.more(K * own.tokens * INDEX + 2 * _normed(own), made)


def _depth(own: Share) -> Iterator[Moment]:
    """Yield moments of a forward of one depth that saves its tensors, beside those before."""
    plain, t, D = of_blocks(own), own.stream, own.config.model.dim
    s, w, r = own.compute, own.wide, own.residual
    half, x = t * D * s, t * D * r
    rms = 2 * t * w
    yield norm_forward(own).more(half + rms)
    yield Moment("halves", 4 * half + rms)
    yield Moment("projection", 2 * half + rms + half + (x if r != s else 0))
    front = rms + 2 * half + x
    for moment in traced_moments(plain, "A", NOTHING, backward=False):
        yield moment.more(front)
    front += x + _sum(traced_kept(plain, "A", NOTHING))
    for moment in traced_moments(plain, "F", NOTHING, backward=False):
        yield moment.more(front)
    front += x + _sum(traced_kept(plain, "F", NOTHING))
    yield Moment("handed on", norm_forward(own).tensors + front)


def _depth_back(own: Share) -> Iterator[Moment]:
    """Yield moments of one depth's backward, with all its tensors alive."""
    plain, t, D = of_blocks(own), own.stream, own.config.model.dim
    s, w, r, narrow = own.compute, own.wide, own.residual, own.compute if own.parallel else own.wide
    kept = _sum(depth(own))
    half, x = t * D * s, t * D * r
    view = half if plain.config.model.mtp.hidden == "pre_norm" else 0  # of the head's gradients
    yield norm_back(own, 3 * t * w).more(kept - t * w - view)
    kept -= t * w + x + _sum(traced_kept(plain, "F", NOTHING))
    made = D * w
    for moment in traced_moments(plain, "F", NOTHING, backward=True):
        yield moment.more(kept, made)
    made += gradient_bytes(plain, "F") + D * w
    kept -= x + _sum(traced_kept(plain, "A", NOTHING))
    for moment in traced_moments(plain, "A", NOTHING, backward=True):
        yield moment.more(kept, made)
    made += gradient_bytes(plain, "A") + D * w + 2 * D * D * narrow
    cast = half if r != s else 0
    yield Moment("projection", x * (not cast) + cast + 4 * half + 2 * t * w, made)
    yield norm_back(own, 4 * t * w).more(2 * half, made)


def _before(own: Share, k: int) -> int:
    """Return bytes that the embeddings and the first k depths save, and hand to the next."""
    mtp = own.config.model.mtp
    post = mtp.hidden == "post_norm"
    found = _sum(looked_up(own))
    again = min(k, mtp.depths - 1) if own.config.recompute.mtp else 0
    each = own.stream * own.config.model.dim * (own.compute if post else own.residual)
    return found + again * each + (k - again) * (_sum(depth(own)) + (_normed(own) if post else 0))


def _rows(own: Share, times: int) -> Share:
    """Return the sizes of the rank with `times` as many rows of a microbatch."""
    return replace(own, rows=own.rows * times)


def _gradients(own: Share) -> int:
    """Return bytes of the weight gradients of one block."""
    plain, D, narrow = of_blocks(own), own.config.model.dim, own.wide
    narrow = own.compute if own.parallel else own.wide
    blocks = gradient_bytes(plain, "A") + gradient_bytes(plain, "F")
    return blocks + 5 * D * own.wide + 2 * D * D * narrow


def _pending(own: Share) -> int:
    """Return bytes of a shared block's gradients that wait for those of other depths.

    Gradients of weights that autocast casts are as narrow as their products.
    """
    plain, D = of_blocks(own), own.config.model.dim
    wide = [w for letter in "AF" for w in weights(plain.config.model, letter)]
    found = sum(whole(plain, w) * (own.wide if w.wide else own.compute) for w in wide)
    w2 = 0 if own.parallel else whole(plain, wide[-1]) * (own.wide - own.compute)
    return found + w2 + 3 * D * own.wide + 2 * D * D * own.compute


def _new(own: Share, made: int) -> int:
    """Return bytes that a depth adds to waiting gradients, each summed with its own at once."""
    wider = 0 if own.parallel else own.wide - own.compute
    largest = whole(own, weights(of_blocks(own).config.model, "F")[-1])
    one = largest * (own.compute if own.parallel else own.wide)
    return made if made <= one else max(one, made * wider // own.wide)


def _normed(own: Share) -> int:
    """Return bytes of the head's input for one depth, sharded as between blocks."""
    return own.stream * own.config.model.dim * own.compute


def _sum(kept: Iterable[Kept]) -> int:
    return sum(numbers * each for group, numbers, each in kept if group != "weights")
