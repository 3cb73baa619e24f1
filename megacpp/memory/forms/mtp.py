"""Multi-token prediction in closed form: weights, saved activations, fullest moments; no torch.

It is a part behind the last norm that includes the embedding's second call. Each depth has an A and
an F block, with the closed forms of layers; the head's second call belongs to the head.

Legend: n tokens of this rank, t those of the residual stream, D model, K depths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megacpp.blocks.mtp.plan import block_model, num_blocks
from megacpp.config.schema import ModelConfig
from megacpp.memory.forms.activation_share import INDEX, Kept, Share
from megacpp.memory.forms.traced import traced_kept
from megacpp.model.regions import NOTHING

if TYPE_CHECKING:
    from megacpp.memory.forms.weights import Weight

TERMS = 6  # of auxiliary losses, each with a sum for the record (megacpp/model/auxiliary.py)


def mtp_weights(
    model: ModelConfig, weights: Callable[[ModelConfig, str], tuple[Weight, ...]]
) -> Iterator[Weight]:
    """Yield parameters of all blocks; `weights` gives those of one layer of a kind."""
    plain, d = block_model(model), model.dim
    (norm,) = weights(model, "norm")
    for _ in range(num_blocks(model.mtp)):
        yield replace(norm, name="embed_norm")
        yield replace(norm, name="hidden_norm")
        yield replace(norm, name="projection", shape=(d, 2 * d), wide=False, muon=True)
        yield from (*weights(plain, "A"), *weights(plain, "F"), norm)


def mtp_buffers(model: ModelConfig, store: int) -> int:
    """Return bytes of the scale of losses, their sums for the record, and a weight per depth."""
    return (1 + TERMS + model.mtp.depths) * store


def of_blocks(own: Share) -> Share:
    """Return sizes of the same rank, for a model whose A and F blocks are those of a depth."""
    own = own.uncompressed
    return replace(own, config=replace(own.config, model=block_model(own.config.model)))


def looked_up(own: Share) -> Iterator[Kept]:
    """Yield embeddings of all depths, and their token ids."""
    model = own.config.model
    depths, learns = model.mtp.depths, not model.mtp.detach_trunk
    yield "embeddings", depths * own.stream * model.dim, own.residual
    yield "words", depths * own.tokens * learns, INDEX + (own.tp > 1)


def depth(own: Share) -> Iterator[Kept]:
    """Yield tensors that a depth saves without recompute, except the states for the next depth."""
    D, t, plain = own.config.model.dim, own.stream, of_blocks(own)
    yield "normed", 3 * t, own.wide
    yield "halves", t * 2 * D, own.compute
    yield "residual", 3 * t * D, own.residual
    yield from traced_kept(plain, "A", NOTHING)
    yield from traced_kept(plain, "F", NOTHING)


def mtp(own: Share) -> Iterator[Kept]:
    """Yield saved tensors of all depths; a recomputed one, not the last, saves only its input."""
    mtp, D, t = own.config.model.mtp, own.config.model.dim, own.stream
    post = mtp.hidden == "post_norm"
    yield from looked_up(own)
    between = t * D * (mtp.depths - 1)
    again = own.config.recompute.mtp
    if post or again:
        yield "handed on", between, own.compute if post else own.residual
    for _ in range(1 if again else mtp.depths):
        yield from depth(own)


def handed_back(own: Share) -> int:
    """Return bytes of the last norm's output, if the first depth reads it."""
    model = own.config.model
    reads = model.mtp.depths and model.mtp.hidden == "post_norm"
    return own.stream * model.dim * own.compute if reads else 0
