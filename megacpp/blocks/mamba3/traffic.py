"""Bytes that Mamba-3 sends over the context axis; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    m, dim = own.config.model.mamba3, own.config.model.dim
    heads, rank = m.expand * dim // m.headdim // own.tp, m.mimo_rank
    bc, angles = 2 * m.ngroups * m.d_state * rank, int(m.d_state * m.rope_fraction) // 2
    yield "ends of chunks", own.halo_bytes(heads * m.headdim + bc, m.conv_kernel)
    groups = max(1, m.ngroups // own.tp)
    if own.config.mesh.cp_mamba3 == "state":
        numbers = heads * (m.headdim * m.d_state + angles + m.headdim + 2)
        numbers += rank * groups * m.d_state
        yield "states", 2 * own.cp * own.chunks * own.rows * numbers * own.wide
        return
    bc = bc // m.ngroups * groups
    cut = groups % own.cp == 0
    moved = heads * (3 * m.headdim + 1) + (bc if cut else 0)
    yield "heads", 2 * own.tokens * moved * own.compute
    yield "heads", 2 * own.tokens * heads * 2 * own.wide
    gathered = angles + (0 if cut else bc)
    yield "heads", 2 * own.rows * own.row * gathered * own.compute
