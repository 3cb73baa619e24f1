"""What n-gram memories in front of A blocks keep for the backward.

Legend: n tokens of this rank, t those of the residual stream, D model, C channels of all residual
streams, M memory, H tables; s bytes of a number in compute, w of what is never narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.blocks.engram.sizes import memory_width
from megacpp.memory.forms.activation_share import INDEX, Kept, Pieces, Share
from megacpp.model.pattern import layer_kinds
from megacpp.model.regions import BLOCK

RUNS_AGAIN: Pieces = frozenset({"engram"})


def tables(own: Share) -> int:
    """Rows that a token looks up."""
    e = own.config.model.engram
    return e.heads * (e.max_order - 1)


def past(own: Share) -> int:
    """Tokens that the convolution looks back."""
    e = own.config.model.engram
    return (e.conv_kernel - 1) * e.max_order


def rows_bytes(own: Share, layers: list[int]) -> int:
    """Of one microbatch: which rows each token looks up, for those of `layers` that remember.

    And per tap of the convolution the tokens whose document reaches back as far, once for all.
    """
    kinds, e = layer_kinds(own.config.model), own.config.model.engram
    count = sum("+engram" in kinds[i] for i in layers)
    if not count:
        return 0
    back, chunk = past(own), own.here // own.chunks
    long = chunk + (back if own.cp > 1 else 0)
    masks = own.rows * own.chunks * sum(long - j * e.max_order for j in range(e.conv_kernel))
    return count * own.rows * own.here * tables(own) * INDEX + masks


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of tensors: a memory of own tokens, all streams, one value, and one residual stream.

    Attributes:
        looked: of a cut table, where its rows are and which of them are here.
        numbers: one wide number per token and stream.
        convolved: what the convolution keeps.
        channels: all streams; `wide`: never narrower than fp32.
    """

    own: Share
    memory: int
    looked: int
    key: int
    value: int
    numbers: int
    convolved: int
    channels: int
    wide: int
    stream: int

    @staticmethod
    def of(own: Share) -> Sizes:
        model, s, w, t = own.config.model, own.compute, own.wide, own.stream
        streams = model.mhc.streams
        C = streams * model.dim
        halo = own.rows * own.chunks * past(own) * C // own.tp if own.cp > 1 else 0
        return Sizes(
            own,
            memory=t * memory_width(model) * s,
            looked=own.tokens * tables(own) * (INDEX + 1) if own.tp > 1 else 0,
            key=t * C * s,
            value=t * model.dim * s,
            numbers=t * streams * w,
            convolved=(t * C + halo) * s,
            channels=t * C * s,
            wide=t * C * w,
            stream=t * C * own.residual,
        )

    @property
    def narrow(self) -> bool:
        return self.own.compute < self.own.wide


def kept(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """The memory, keys and values, the gate and the convolution's inputs, and their sum."""
    if pieces >= BLOCK:
        return
    z, again = Sizes.of(own), pieces >= RUNS_AGAIN
    yield "memory", z.looked + z.memory, 1
    if not again:
        yield "memory", z.key + z.value + 4 * z.numbers + z.channels, 1
        yield "memory", z.convolved + z.stream, 1
        return
    if own.cp > 1:
        yield "memory", z.convolved - z.channels, 1  # the ends of chunks that were gathered
    if own.tp > 1:
        yield "memory", 2 * z.channels, 1  # what was exchanged, there and back


def kept_bytes(own: Share, pieces: Pieces) -> int:
    """All of it."""
    return sum(numbers * each for _, numbers, each in kept(own, pieces))
