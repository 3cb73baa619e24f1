"""Bytes that a rank's attention layers share, and send; products that repeat; no torch import."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megacpp.config.schema import Config
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.regions import Region


def shared_bytes(own: LocalShapes, kinds: Collection[str], saved: bool) -> int:
    """Return bytes of masks, of angles, and of chosen keys.

    Args:
        own: sizes of the rank.
        kinds: of the parts that this rank has.
        saved: only tensors that a backward reads.
    """
    from megacpp.model.pattern import masked  # which imports the descriptors

    a, mesh = own.config.model.attention, own.config.mesh
    rows, row, here = own.rows, own.row, own.here
    found = rows * here * min(a.sparse.top_k, row) * 4 * _choices(own, kinds)
    queries = row if mesh.cp > 1 and mesh.cp_attention == "heads" else here
    masks = len({"+full" in kind for kind in kinds if masked(kind, own.warms_up)})
    if own.attends_by == "flex":
        places = queries + (row if queries < row else 0)  # and documents
        blocks = -(-queries // 128) * -(-row // 128)
        found += masks * rows * (places * 8 + 4 * 4 * blocks)
    elif own.masked and not (mesh.cp > 1 and mesh.cp_attention == "ring"):
        each = (not saved) + (own.compute if a.softcap is None else saved)
        found += masks * rows * queries * row * each
    rotated = a.qk_rope_head_dim if a.kind == "mla" else a.head_dim
    tables = masks if a.full_layers and a.yarn is not None else 1
    index = a.sparse.head_dim if any("A.index" in kind for kind in kinds) else rotated
    angles = tables * rotated + index * (index != rotated and a.kind != "mla")
    return found + angles * rows * here * own.wide


def _choices(own: LocalShapes, kinds: Collection[str]) -> int:
    """Return the number of key choices kept with the documents: of layers here, and received."""
    if own.warms_up or not any(kind.startswith("A.") for kind in kinds):
        return 0
    received = sum(part.reads for part in own.stage_parts)
    return received + sum("A.index" in kind for kind in own.kinds)


def sends(own: LocalShapes, parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, str, int]]:
    """Yield what indexers send: what attention looks at, summed over heads, and their keys."""
    sparse = own.config.model.attention.sparse
    looked_at = own.tokens * min(sparse.top_k, own.row) * own.wide
    keys = own.rows * own.row * sparse.head_dim * own.compute
    for again in (again for kind, again in parts if "A.index" in kind):
        yield "tp", "indexer", (1 + again) * looked_at * (own.tp > 1)
        yield "cp", "indexer", (2 + again) * keys * (own.cp > 1)


def replayed(config: Config, kind: str, regions: frozenset[Region]) -> float:
    """Multiply-adds a token that a backward repeats beside those that `block_flops` counts.

    A fused kernel pads MLA's values to the keys' width; attention to chosen keys pads none. An
    indexer's loss makes gradients and the logits that it imitates again; its scores are counted,
    and the choice of keys is reused from the first run.
    """
    a, whole, sparse = config.model.attention, "block" in regions, kind.startswith("A.")
    query, value = a.head_dims
    padded = a.num_heads * (query - value)
    found = padded * (whole - sparse) if whole or "core_attn" in regions else 0
    if whole and "A.index" in kind:
        found += 3 * a.sparse.num_heads * a.sparse.head_dim + a.num_heads * query
    return float(config.data.seq_len * found)
