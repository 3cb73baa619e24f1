"""Parameters of each kind of block, counted from the configuration; no torch import here.

What needs a model's weight before torch is loaded (pipeline cuts, rules) asks here; the meta model
of megacpp/model/count.py is the other way to know, and tests/model/test_stages.py holds the two
together.
"""

from __future__ import annotations

from megacpp.blocks.features import FEATURES
from megacpp.blocks.kinds import KINDS
from megacpp.blocks.mtp.plan import block_model, num_blocks
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
    """Parameters behind the last layer: its norm, blocks of multi-token prediction, and the heads.

    A tied head shares the embedding's weight and isn't counted.
    """
    vocabulary = config.vocab_size * config.dim
    return config.dim + mtp_parameters(config) + FEATURES["top"].numel(config) + vocabulary


def copied_parameters(config: ModelConfig) -> int:
    """Parameters of the copy of the embedding that a last stage of several has."""
    copied = config.mtp.depths > 0 and not config.tie_embeddings
    return config.vocab_size * config.dim * copied


def mtp_parameters(config: ModelConfig) -> int:
    """Parameters of multi-token prediction: norms and projection of two halves, A and F blocks."""
    mixers = sum(KINDS[letter].numel(block_model(config)) for letter in "AF")
    return num_blocks(config.mtp) * (FEATURES["mtp"].numel(config) + mixers)


def idle_parameters(config: ModelConfig) -> int:
    """Parameters of experts that a token doesn't visit, of all layers."""
    e, layers = config.moe, sum(kind[0] == "E" for kind in layer_kinds(config))
    each = (3 if e.activation == "swiglu" else 2) * config.dim * e.hidden_dim
    return layers * (e.num_experts - e.top_k) * each


def projected_width(width: int, ratio: float) -> int:
    """Return the dims that `recompute.compress` keeps of an input of `width` dims."""
    return max(1, round(width * ratio))
