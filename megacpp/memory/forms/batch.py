"""Bytes of a step's rows on one rank: ids, and tensors made from documents; no torch import."""

from __future__ import annotations

from collections.abc import Collection

from megacpp.blocks.features import FEATURES, ahead_blocks
from megacpp.blocks.kinds import KINDS
from megacpp.memory.forms.local_shapes import LocalShapes


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
    found = own.rows * own.here * 4 * 8 if own.cp > 1 else 0
    mixers = {kind[0] for kind in kinds} & set(KINDS)
    ahead = ahead_blocks(own.config.model)
    mixers.update(*(blocks.alike for blocks in ahead if blocks.name in kinds))
    found += sum(KINDS[letter].shared_bytes(own, kinds, saved) for letter in mixers)
    return found + sum(one.shared_bytes(own, kinds) for one in FEATURES.values())
