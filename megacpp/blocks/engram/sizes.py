"""Sizes of Engram's tables, counted from the configuration; no torch import here."""

from __future__ import annotations

from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import layer_kinds
from megacpp.model.primes import primes_from

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


def engram_parameters(config: ModelConfig) -> int:
    """Parameters of one layer: tables, keys of each stream, values, norms and taps."""
    e, d, streams = config.engram, config.dim, config.mhc.streams
    projections = (streams + 1) * d * (memory_width(config) + 1)
    return table_rows(config) * (e.dim // e.heads) + projections + streams * d * (3 + e.conv_kernel)


def engram_shapes(
    config: ModelConfig,
) -> list[tuple[str, tuple[int, ...], int | None, bool, bool]]:
    """Parameters of a layer: name, shape, dim that `tp` cuts, moved by Muon, fp32 contract."""
    e, width = config.engram, memory_width(config)
    channels = config.mhc.streams * config.dim
    norms = [
        (f"engram.{name}_norm", (channels,), None, False, True) for name in ("key", "x", "value")
    ]
    return [
        ("engram.tables", (table_rows(config), e.dim // e.heads), 0, False, False),
        ("engram.wk", (channels, width), None, True, False),
        ("engram.wk.bias", (channels,), None, False, False),
        ("engram.wv", (config.dim, width), None, True, False),
        ("engram.wv.bias", (config.dim,), None, False, False),
        *norms,
        ("engram.conv", (channels, 1, e.conv_kernel), 0, False, False),
    ]
