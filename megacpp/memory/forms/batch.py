"""Bytes of a step's rows on one rank: ids, and tensors made from documents; no torch import."""

from __future__ import annotations

from collections.abc import Collection

from megacpp.memory.forms.layers import masked
from megacpp.memory.forms.local_shapes import INDEX, LocalShapes
from megacpp.model.pattern import layer_kinds
from megacpp.model.stages import stage_parts


def ids_bytes(own: LocalShapes) -> int:
    """Return bytes of ids, labels, document numbers and positions, over a step's microbatches."""
    return max(1, own.config.train.grad_accum) * own.rows * own.row * 4 * 8


def mask_bytes(own: LocalShapes, kinds: Collection[str], saved: bool = False) -> int:
    """Return bytes that all layers share of one microbatch: masks, angles, document starts.

    Args:
        own: sizes of the rank.
        kinds: of layers that this rank has.
        saved: only tensors that a backward reads, which outlive the documents themselves.
    """
    config = own.config
    rows, row, here = own.rows, own.row, own.here
    letters = {"A" if kind == "mtp" else kind[0] for kind in kinds}  # which attends
    model, mesh = config.model, config.mesh
    found = rows * here * 4 * 8 if mesh.cp > 1 else 0
    if "A" in letters:
        a = model.attention
        found += rows * here * min(a.sparse.top_k, row) * 4 * _choices(own, kinds)
        heads = mesh.cp > 1 and mesh.cp_attention == "heads"
        queries = row if heads else here
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
        found += (tables * rotated + index * (index != rotated and a.kind != "mla")) * (
            rows * here * own.wide
        )
    if "M" in letters:
        tokens = row if mesh.cp > 1 and mesh.cp_mamba3 == "heads" else here
        chunk = model.mamba3.chunk_size if config.kernels.mamba3 in ("auto", "torch") else 0
        found += rows * tokens * (chunk * own.wide + 6)
    if "E" in letters:
        found += rows * row * 16
        if own.tp > 1 or mesh.cp > 1:
            found += rows * row * 8 + own.stream * 48
    if "G" in letters:
        found += rows * row * (model.gated_deltanet.chunk_size + 1)
    if "R" in letters:
        found += rows * row * 9
    if any("+engram" in kind for kind in kinds):
        found += _memory_bytes(own)
    return found


def _memory_bytes(own: LocalShapes) -> int:
    """Return bytes of the row ids that tokens look up in n-gram memories, and of masks of taps.

    Masks of the convolution's taps, which end at documents, are made once for all layers.
    """
    kinds, e = layer_kinds(own.config.model), own.config.model.engram
    count = sum("+engram" in kinds[i] for i in own.layers)
    long = own.here // own.chunks
    if own.cp > 1:  # with earlier tokens
        long += (e.conv_kernel - 1) * e.max_order
    masks = own.rows * own.chunks * sum(long - j * e.max_order for j in range(e.conv_kernel))
    return count * own.tokens * e.heads * (e.max_order - 1) * INDEX + masks


def _choices(own: LocalShapes, kinds: Collection[str]) -> int:
    """Return the number of key choices kept with the documents: of layers here, and received."""
    config = own.config
    if own.warms_up or not any(kind.startswith("A.") for kind in kinds):
        return 0
    all_kinds = layer_kinds(config.model)
    made = sum("A.index" in all_kinds[layer] for layer in own.layers)
    if config.mesh.pp == 1:
        return made
    return made + sum(p.reads for p in stage_parts(config.model, config.mesh, own.stage))
