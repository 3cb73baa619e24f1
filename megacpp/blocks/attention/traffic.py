"""Bytes that attention sends over the context axis; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    a, kind = own.config.model.attention, own.config.mesh.cp_attention
    grouped, everyone = a.kind == "gqa", own.rows * own.row
    heads = a.num_heads // own.tp
    if grouped:
        shared = a.num_kv_heads // own.tp * 2 * a.head_dim
    else:
        shared = a.kv_lora_rank + a.qk_rope_head_dim
    if kind == "all_gather":
        yield "keys and values", 2 * everyone * shared * own.compute
    elif kind == "ring":  # blocks around in both walks, their gradients in fp32 home
        block = own.tokens * shared
        yield "keys and values", (own.cp - 1) * 2 * 2 * block * own.compute
        yield "keys and values", (own.cp - 1) * 2 * block * own.wide
    elif grouped:
        yield "heads", 2 * own.tokens * (2 * heads * a.head_dim + shared) * own.compute
    else:
        widths = a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim
        yield "heads", 2 * own.tokens * heads * widths * own.compute
        yield "keys and values", 2 * everyone * shared * own.compute
