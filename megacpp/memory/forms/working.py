"""Working sets: bytes that a part of the model needs while it runs, beside other parts' tensors.

`forward` and `backward` give the fullest moments of one layer. Counted at a moment: saved tensors
of the layer that are alive, gradients from later layers, temporaries, and the whole gradients of
the layer's own weights that this microbatch has made. Not counted: weights (shards, gathered, in
collectives), saved tensors of earlier layers. tests/memory/working_sets.py measures the same in a
traced step.

Gradients of earlier microbatches are counted elsewhere: with FSDP2 they exist beside the new ones,
in fp32; in a single process each new one is added to its own and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megacpp.memory.forms import (
    working_around,
    working_engram,
    working_head,
    working_mtp,
)
from megacpp.memory.forms.activation_share import Share
from megacpp.memory.forms.fp8 import with_copies
from megacpp.memory.forms.moment import Moment, one_at_a_time
from megacpp.memory.forms.streams import Layered, connected_backward, connected_forward
from megacpp.memory.forms.traced import traced_moments
from megacpp.memory.forms.weights import COPY
from megacpp.memory.forms.working_frame import (
    gradient_bytes,
    kept_of_block,
    largest_gradient,
)

__all__ = ["Moment", "backward", "first_attention", "forward"]

ENDS: dict[str, tuple[Callable[[Share], Iterator[Moment]], ...]] = {
    "embed": (working_head.embed, working_head.embed_back),
    "ngram": (working_around.ngram, working_around.ngram_back),
    "spread": (working_head.spread, working_head.spread_back),
    "collapse": (working_head.collapse, working_head.collapse_back),
    "norm": (working_head.last_norm, working_head.last_norm_back),
    "top": (working_around.top, working_around.top_back),
    "mtp": (working_mtp.mtp, working_mtp.mtp_back),
    COPY: (working_head.copy, working_head.copy),
    "head": (working_head.head, working_head.head_back),
    "received": (working_head.received, working_head.received),
}


def forward(own: Share, name: str, first: bool = False) -> tuple[Moment, ...]:
    """Return the fullest moments of a part in the forward.

    Args:
        own: sizes of the rank.
        name: as in `activations.PartBytes`.
        first: the layer makes the tensors that all layers of a batch share.
    """
    layer = Layered.of(name)
    kind = layer.kind
    if kind in ENDS:
        return tuple(ENDS[kind][0](own))
    own, pieces = layer.sizes(own)
    found = traced_moments(own, _what(kind), pieces, backward=False, first=first)
    found = with_copies(own, kind[0], pieces, found)
    if own.config.model.mhc.streams > 1:
        found = connected_forward(own, layer, found)
    if "+engram" not in kind:
        return tuple(found)
    return *working_engram.forward(own, pieces), *working_engram.behind(own, pieces, found)


def backward(own: Share, name: str) -> tuple[Moment, ...]:
    """Return the fullest moments of a part in the backward, recomputation included."""
    layer = Layered.of(name)
    kind = layer.kind
    if kind in ENDS:
        return tuple(ENDS[kind][1](own))
    own, pieces = layer.sizes(own)
    found = traced_moments(own, _what(kind), pieces, backward=True)
    found = with_copies(own, kind[0], pieces, found)
    if not own.parallel:
        found = one_at_a_time(found, largest_gradient(own, _what(kind)))
    if own.config.model.mhc.streams > 1:
        made = gradient_bytes(own, _what(kind)) + own.config.model.dim * own.wide
        kept = kept_of_block(own, _what(kind), pieces)
        found = connected_backward(own, layer, pieces, found, made, kept)
    if "+engram" not in kind:
        return tuple(found)
    before = working_engram.before(own, pieces, found)
    return *before, *working_engram.backward(own, pieces)


def first_attention(own: Share, name: str) -> tuple[Moment, ...]:
    """Return moments of the first A block's forward, which makes the masks of a batch.

    They replace the plain ones; the masks themselves belong to the batch.

    Args:
        own: sizes of the rank.
        name: of the part; for another part than an A block, moments of its A blocks.
    """
    if name[0] == "A":
        return forward(own, name, first=True)
    own, pieces = Layered.of("A").sizes(own)
    return traced_moments(own, "A", pieces, backward=False, first=True)


def _what(kind: str) -> str:
    """Return the mixer of a kind."""
    return kind.partition("+")[0]
