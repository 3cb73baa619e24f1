"""What a part of the model needs while it runs, in closed form: beside what others keep.

`forward` and `backward` give the fullest moments of one layer. Counted at a moment: what the layer
keeps, as far as it is alive, what came from behind, temporaries, and the gradients of the layer's
own weights that this microbatch has made, whole. Not counted: weights (shards, gathered, in
collectives), what layers before keep. tests/memory/working_sets.py finds the same in a traced step.

The sums that earlier microbatches left in the gradients are for others to add: with FSDP2 they are
there beside the new ones, in fp32; in a single process each new one is added to its own and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megacpp.memory.forms import (
    working_attention,
    working_blocks,
    working_experts,
    working_head,
    working_latent,
    working_m2rnn,
    working_mamba3,
)
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_frame import framed_backward, framed_forward, framed_inside
from megacpp.model.pieces import NOTHING, pieces_of

__all__ = ["Moment", "backward", "first_attention", "forward"]

Inside = Callable[[Share, Pieces], Iterator[Moment]]

MIXERS: dict[str, tuple[Inside, Inside]] = {
    "A": (working_attention.grouped, working_attention.grouped_back),
    "E": (working_experts.experts, working_experts.experts_back),
    "F": (working_blocks.feed_forward, working_blocks.feed_forward_back),
    "M": (working_mamba3.forward, working_mamba3.backward),
    "R": (working_m2rnn.forward, working_m2rnn.backward),
}
ENDS: dict[str, tuple[Callable[[Share], Iterator[Moment]], ...]] = {
    "embed": (working_head.embed, working_head.embed_back),
    "norm": (working_head.last_norm, working_head.last_norm_back),
    "head": (working_head.head, working_head.head_back),
    "received": (working_head.received, working_head.received),
}


def forward(own: Share, name: str) -> tuple[Moment, ...]:
    """The fullest moments of a part (a name of `activations.PartBytes`) in the forward."""
    kind, _, last = name.partition(" ")
    if kind in ENDS:
        return tuple(ENDS[kind][0](own))
    letter = kind[0]
    pieces = NOTHING if last else pieces_of(own.config.recompute, own.config.model, letter)
    return tuple(framed_forward(own, letter, pieces, _mixer(own, kind)[0]))


def backward(own: Share, name: str) -> tuple[Moment, ...]:
    """The same in the backward, with what it runs again."""
    kind, _, last = name.partition(" ")
    if kind in ENDS:
        return tuple(ENDS[kind][1](own))
    letter = kind[0]
    pieces = NOTHING if last else pieces_of(own.config.recompute, own.config.model, letter)
    return tuple(framed_backward(own, letter, pieces, *_mixer(own, kind)))


def first_attention(own: Share) -> tuple[Moment, ...]:
    """Moments of the first A block of a forward beside those of each: it makes the mask.

    For packed rows alone; where every row is one document there is none.
    """
    pieces = pieces_of(own.config.recompute, own.config.model, "A")
    latent = own.config.model.attention.kind == "mla"
    first = working_latent.first_latent if latent else working_attention.first_attention
    return tuple(framed_inside(own, "A", pieces, first))


def _mixer(own: Share, kind: str) -> tuple[Inside, Inside]:
    """Forward and backward of a kind's mixer."""
    mixer = kind.partition("+")[0]
    if mixer == "A" and own.config.model.attention.kind == "mla":
        return working_latent.latent, working_latent.latent_back
    return MIXERS[mixer]
