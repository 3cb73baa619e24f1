"""Bytes that M2RNN sends over the context axis; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megacpp.blocks.m2rnn.descriptor import num_heads

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    r, wanted = own.config.model.m2rnn, own.config.mesh.cp_m2rnn
    heads = num_heads(own.config.model) // own.tp
    qk = [n // own.tp if n > 1 else n for n in (r.num_q_heads, r.num_k_heads)]
    channels = heads * r.value_dim + sum(qk) * r.key_dim
    yield "ends of chunks", own.halo_bytes(channels, r.conv_kernel)
    if wanted == "serial" or (wanted == "auto" and heads % own.cp):
        # A state over every border of two ranks' chunks, and its gradient back.
        chunk = [own.context] if own.chunks == 1 else [own.context, 2 * own.cp - 1 - own.context]
        most = own.cp * own.chunks
        turning = own.chunks == 2 and own.context == own.cp - 1  # its two chunks are neighbours
        borders = sum((c > 0) + (c < most - 1) for c in chunk) - 2 * turning
        state = own.rows * heads * r.key_dim * r.value_dim * own.wide
        yield "states", 2 * borders * state
        return
    moved = heads * 2 * r.value_dim + sum(n * r.key_dim for n in qk if n % own.cp == 0)
    gathered = sum(n * r.key_dim for n in qk if n % own.cp)
    yield "heads", 2 * own.tokens * moved * own.compute
    yield "heads", 2 * own.tokens * heads * own.wide
    yield "heads", 2 * own.rows * own.row * gathered * own.compute
