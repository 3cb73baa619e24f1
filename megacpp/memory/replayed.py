"""FLOPs that a backward recomputes, from the configuration; see megacpp/model/flops.py for others.

Only matrix products count, two FLOPs per multiply-add: norms, convolutions, gates and rotations are
recomputed for free here. The FLOPs of each region were counted on the running model (`megacpp
activations --levers`), against which tests/memory/test_replayed.py checks this file. Padding of
groups of experts isn't counted. (Activation memory.)
"""

from __future__ import annotations

from megacpp.blocks.engram.sizes import memory_width
from megacpp.blocks.hyper_connections.groups import places_in_groups
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config
from megacpp.model.flops import ahead_flops, block_flops, connection_flops
from megacpp.model.pattern import layer_kinds, layer_model
from megacpp.model.regions import BLOCK, layer_regions


def replayed_flops_per_token(config: Config) -> float:
    """Return recomputed FLOPs of one token through all layers, under `config.recompute`."""
    model, policy = config.model, config.recompute
    total, (read, mix) = 0.0, connection_flops(model)
    layers = zip(
        layer_kinds(model), layer_regions(policy, model), places_in_groups(config), strict=True
    )
    for kind, pieces, group in layers:
        if group is not None:
            total += read if group.closes else read + mix
        letter, own = kind[0], layer_model(model, kind)
        total += 2.0 * KINDS[letter].replayed(config)
        if pieces >= BLOCK:
            total += block_flops(kind, model, config.data.seq_len)
            if not model.post_norm and (model.mhc.streams == 1 or group is not None):
                total -= 2.0 * KINDS[letter].last_product(model)
            total += _padded_values(config) if kind.partition("+")[0] == "A" else 0.0
            total += _learnt_again(config) if "A.index" in kind else 0.0
        else:
            ran = pieces if "+engram" in kind else pieces - {"engram"}
            total += 2.0 * sum(
                KINDS[letter].region_multiply_adds(piece, own, config.data.seq_len) for piece in ran
            )
            if "engram" in ran:
                total += 2.0 * (model.mhc.streams + 1) * model.dim * memory_width(model)
            if "core_attn" in pieces and kind.startswith("A."):  # its blocks pad no values
                total -= _padded_values(config)
    return total + ahead_again(config)


def ahead_again(config: Config) -> float:
    """Return recomputed FLOPs of all depths but the last, without those of the head."""
    model = config.model
    if not (config.recompute.mtp and model.mtp.depths > 1):
        return 0.0
    whole = ahead_flops(model, config.data.seq_len) / model.mtp.depths
    own = whole - 2.0 * model.dim * model.vocab_size + _padded_values(config)
    return (model.mtp.depths - 1) * own


def _padded_values(config: Config) -> float:
    """Return FLOPs of padding MLA's values to the keys' width, as a fused kernel does."""
    a = config.model.attention
    narrow = a.qk_nope_head_dim + a.qk_rope_head_dim - a.v_head_dim if a.kind == "mla" else 0
    return 2.0 * config.data.seq_len * a.num_heads * narrow


def _learnt_again(config: Config) -> float:
    """Return recomputed FLOPs of an indexer's loss: its gradients, and the logits that it imitates.

    block_flops counts the scores for the loss; the choice of keys itself is reused from the first
    run.
    """
    a = config.model.attention
    head_dim = a.head_dim if a.kind == "gqa" else a.qk_nope_head_dim + a.qk_rope_head_dim
    gradients = 3 * a.sparse.num_heads * a.sparse.head_dim
    return 2.0 * config.data.seq_len * (gradients + a.num_heads * head_dim)
