"""Parameters of each kind of block, counted from the configuration; no torch import here.

What needs a model's weight before torch is loaded (pipeline cuts, rules) asks here; the meta model
of megacpp/model/count.py is the other way to know, and tests/model/test_stages.py holds the two
together.
"""

from __future__ import annotations

from megacpp.blocks.features import FEATURES, ahead_blocks
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import layer_kinds


def layer_parameters(config: ModelConfig) -> list[int]:
    """Parameters of every layer, its norm and hyper-connection included."""
    layers = layer_kinds(config)
    by_kind = {
        kind: config.dim
        + KINDS[kind[0]].numel(config, kind)
        + FEATURES["engram"].numel(config, kind)
        + FEATURES["mhc"].numel(config, kind)
        for kind in sorted(set(layers))
    }
    return [by_kind[kind] for kind in layers]


def embedding_parameters(config: ModelConfig) -> int:
    """Parameters in front of the first layer."""
    return config.vocab_size * config.dim + FEATURES["ngram"].numel(config)


def head_parameters(config: ModelConfig) -> int:
    """Parameters behind the last layer: its norm, blocks for tokens further ahead, and the heads.

    A tied head shares the embedding's weight and isn't counted.
    """
    vocabulary = config.vocab_size * config.dim
    return config.dim + ahead_parameters(config) + FEATURES["top"].numel(config) + vocabulary


def copied_parameters(config: ModelConfig) -> int:
    """Parameters of the copy of the embedding that a last stage of several has."""
    copied = bool(ahead_blocks(config)) and not config.tie_embeddings
    return config.vocab_size * config.dim * copied


def ahead_parameters(config: ModelConfig) -> int:
    """Parameters of blocks for tokens further ahead: their own and those of their mixers."""
    total = 0
    for blocks in ahead_blocks(config):
        mixers = sum(KINDS[letter].numel(blocks.model) for letter in blocks.letters)
        total += blocks.number * (FEATURES[blocks.name].numel(config) + mixers)
    return total


def idle_parameters(config: ModelConfig) -> int:
    """Parameters of experts that a token doesn't visit, of all layers."""
    e, layers = config.moe, sum(kind[0] == "E" for kind in layer_kinds(config))
    each = (3 if e.activation == "swiglu" else 2) * config.dim * e.hidden_dim
    return layers * (e.num_experts - e.top_k) * each


def projected_width(width: int, ratio: float) -> int:
    """Return the dims that `recompute.compress` keeps of an input of `width` dims."""
    return max(1, round(width * ratio))
