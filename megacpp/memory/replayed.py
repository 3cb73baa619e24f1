"""FLOPs that a backward recomputes, from the configuration; see megacpp/model/flops.py for others.

Only matrix products count, two FLOPs per multiply-add: norms, convolutions, gates and rotations are
recomputed for free here. The FLOPs of each region were counted on the running model (`megacpp
activations --levers`), against which tests/memory/test_replayed.py checks this file. Padding of
groups of experts isn't counted. (Activation memory.)
"""

from __future__ import annotations

from megacpp.blocks.features import ahead_blocks
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config
from megacpp.memory.forms.traced import layer_parts
from megacpp.model.flops import (
    block_flops,
    connection_flops,
    feature_multiply_adds,
    pass_flops,
)
from megacpp.model.pattern import layer_model
from megacpp.model.regions import BLOCK, layer_regions


def replayed_flops_per_token(config: Config) -> float:
    """Return recomputed FLOPs of one token through all layers, under `config.recompute`."""
    model, policy = config.model, config.recompute
    total, (read, mix) = 0.0, connection_flops(model)
    several = model.stream_width > model.dim
    for part, pieces in zip(layer_parts(config), layer_regions(policy, model), strict=True):
        if part.grouped:  # the streams behind a group are saved
            total += read + mix * (part.place + 1 < len(part.chain))
        kind, letter, own = part.kind, part.kind[0], layer_model(model, part.kind)
        total += 2.0 * KINDS[letter].replayed(config, kind, pieces)
        if pieces >= BLOCK:
            total += block_flops(kind, model, config.data.seq_len)
            if not model.post_norm and (part.grouped or not several):
                total -= 2.0 * KINDS[letter].last_product(model)
        else:
            ran = pieces if "+engram" in kind else pieces - {"engram"}
            total += 2.0 * sum(
                KINDS[letter].region_multiply_adds(piece, own, config.data.seq_len) for piece in ran
            )
            if "engram" in ran:
                total += 2.0 * feature_multiply_adds(model, kind)
    return total + ahead_again(config)


def ahead_again(config: Config) -> float:
    """Return recomputed FLOPs of all depths but the last, without those of the head."""
    total = 0.0
    for blocks in ahead_blocks(config.model) if config.recompute.mtp else ():
        again = sum(KINDS[letter].replayed(config, letter, BLOCK) for letter in blocks.letters)
        own = pass_flops(blocks, config.data.seq_len) + 2.0 * again
        total += (blocks.passes - 1) * own
    return total
