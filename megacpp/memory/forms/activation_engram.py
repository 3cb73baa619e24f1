"""Activations that n-gram memories in front of A blocks save for the backward.

Legend: n tokens of this rank, t those of the residual stream, D model, C channels of all residual
streams, M memory, H tables; s bytes of an element in compute, w of one never narrower than fp32.
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
    """Return the number of table rows that a token looks up."""
    e = own.config.model.engram
    return e.heads * (e.max_order - 1)


def past(own: Share) -> int:
    """Return the number of earlier tokens that the convolution reads."""
    e = own.config.model.engram
    return (e.conv_kernel - 1) * e.max_order


def rows_bytes(own: Share, layers: list[int]) -> int:
    """Return bytes of the row ids that tokens of one microbatch look up, in `layers` with a memory.

    Masks of the convolution's taps, which end at documents, are counted once for all layers.
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
    """Bytes of the tensors of a memory on one rank.

    Attributes:
        own: sizes of the rank.
        memory: looked-up rows of own tokens.
        looked: of a cut table, row ids and the mask of those on this rank.
        key: keys of all streams.
        value: values, as wide as one stream.
        numbers: one wide element per token and stream.
        convolved: the convolution's input, with tokens before each chunk.
        channels: all streams in compute.
        wide: all streams, never narrower than fp32.
        stream: all streams, in the residual stream's dtype.
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
        """Return the sizes of a rank."""
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
        """Whether compute is narrower than fp32."""
        return self.own.compute < self.own.wide


def kept(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """Yield the memory, keys and values, the gate's and the convolution's inputs, and their sum."""
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
    """Return bytes of all that a memory saves for the backward."""
    return sum(numbers * each for _, numbers, each in kept(own, pieces))
