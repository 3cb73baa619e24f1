"""Sizes of Engram's tables, counted from the configuration; no torch import here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import layer_kinds
from megacpp.model.primes import primes_from

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes

ROWS_MULTIPLE = 256  # of all tables of a layer together, so that ranks can cut them


def engram_primes(config: ModelConfig, layer: int) -> tuple[tuple[int, ...], ...]:
    """Rows of the tables of each order of a layer.

    The first layer with a memory takes the first primes from table_size on, the next one those
    that follow, and so on: no two tables of a model are alike.
    """
    e, kinds = config.engram, layer_kinds(config)
    earlier = sum("+engram" in kind for kind in kinds[:layer])
    each = e.heads * (e.max_order - 1)
    own = primes_from(e.table_size, each * (earlier + 1))[-each:]
    return tuple(own[i : i + e.heads] for i in range(0, each, e.heads))


def table_rows(config: ModelConfig) -> int:
    """Rows of all tables of a layer one below the other, with those that nothing looks up.

    As many in every layer: enough for the last one, whose primes are the largest.
    """
    last = max(i for i, kind in enumerate(layer_kinds(config)) if "+engram" in kind)
    rows = sum(map(sum, engram_primes(config, last)))
    return -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE


def memory_width(config: ModelConfig) -> int:
    """Numbers that a token looks up, over all orders."""
    return config.engram.dim * (config.engram.max_order - 1)


def multiply_adds(model: ModelConfig, kind: str) -> float:
    """Multiply-adds of a key for each residual stream and of a value for all of them."""
    return (model.stream_width + model.dim) * memory_width(model) * ("+engram" in kind)


def shared_bytes(own: LocalShapes, kinds: Collection[str]) -> int:
    """Return bytes of the row ids that tokens look up in n-gram memories, and of masks of taps.

    Masks of the convolution's taps, which end at documents, are made once for all layers.
    """
    if not any("+engram" in kind for kind in kinds):
        return 0
    e, count = own.config.model.engram, sum("+engram" in kind for kind in own.kinds)
    long = own.here // own.chunks
    if own.cp > 1:  # with earlier tokens
        long += (e.conv_kernel - 1) * e.max_order
    masks = own.rows * own.chunks * sum(long - j * e.max_order for j in range(e.conv_kernel))
    ids = count * own.tokens * e.heads * (e.max_order - 1)
    return 8 * ids + masks


def sends(own: LocalShapes, parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, str, int]]:
    """Yield table rows summed over `tp`, tokens exchanged for channels, and ends of chunks.

    Args:
        own: sizes of the rank.
        parts: of the rank, each with whether it is recomputed whole.
    """
    model, e = own.config.model, own.config.model.engram
    walks = sum(2 + again for kind, again in parts if "+engram" in kind)
    moved = own.tokens * memory_width(model) + 2 * own.stream * model.stream_width
    yield "tp", "memories", walks * moved * own.compute * (own.tp > 1)
    halo = own.halo_bytes(model.stream_width // own.tp, e.conv_kernel, e.max_order)
    yield "cp", "ends of chunks", walks * halo // 2 * (own.cp > 1)
