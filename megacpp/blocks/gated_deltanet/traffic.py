"""Bytes that Gated DeltaNet sends over the context axis; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    g = own.config.model.gated_deltanet
    heads, key_heads = g.num_value_heads // own.tp, g.num_key_heads // own.tp
    keys, values = 2 * key_heads * g.key_dim, heads * g.value_dim
    yield "ends of chunks", own.halo_bytes(keys + values, g.conv_kernel)
    if own.config.mesh.cp_gated_deltanet == "state":
        numbers = heads * g.key_dim * (g.key_dim + g.value_dim)
        yield "states", 2 * own.cp * own.chunks * own.rows * numbers * own.wide
        return
    divides = key_heads % own.cp == 0
    yield "heads", 2 * own.tokens * (2 * values + divides * keys) * own.compute
    yield "heads", 2 * own.tokens * heads * 2 * own.wide
    if not divides:
        yield "heads", 2 * own.rows * own.row * keys * own.compute
