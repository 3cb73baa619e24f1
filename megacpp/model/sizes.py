"""Parameters of each kind of block, counted from the configuration; no torch import here.

What needs a model's weight before torch is loaded (pipeline cuts, rules) asks here; the meta model
of megacpp/model/count.py is the other way to know, and tests/model/test_stages.py holds the two
together.
"""

from __future__ import annotations

from megacpp.blocks.engram.sizes import engram_parameters
from megacpp.blocks.kinds import KINDS
from megacpp.blocks.mtp.plan import block_model, num_blocks
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import layer_kinds
from megacpp.model.primes import primes_from

NGRAM_ROWS = 256  # rows of the stacked n-gram tables are a multiple of so many


def layer_parameters(config: ModelConfig) -> list[int]:
    """Parameters of every layer, its norm and hyper-connection included."""
    layers = layer_kinds(config)
    beside = config.dim + _connection(config)
    by_kind = {
        kind: beside
        + KINDS[kind[0]].numel(config, kind)
        + ("+engram" in kind and engram_parameters(config))
        for kind in sorted(set(layers))
    }
    return [by_kind[kind] for kind in layers]


def embedding_parameters(config: ModelConfig) -> int:
    """Parameters in front of the first layer."""
    ngram = config.ngram
    hashed = ngram_rows(ngram) * ngram.dim + ngram_width(ngram) * config.dim if ngram.heads else 0
    return config.vocab_size * config.dim + hashed


def head_parameters(config: ModelConfig) -> int:
    """Parameters behind the last layer: its norm, blocks of multi-token prediction, and the heads.

    A tied head shares the embedding's weight and isn't counted.
    """
    unembeddings = 2 if config.top.loss else 1
    return config.dim + mtp_parameters(config) + unembeddings * config.vocab_size * config.dim


def copied_parameters(config: ModelConfig) -> int:
    """Parameters of the copy of the embedding that a last stage of several has."""
    copied = config.mtp.depths > 0 and not config.tie_embeddings
    return config.vocab_size * config.dim * copied


def mtp_parameters(config: ModelConfig) -> int:
    """Parameters of multi-token prediction: norms and projection of two halves, A and F blocks."""
    if not config.mtp.depths:
        return 0
    plain, d = block_model(config), config.dim
    own = 3 * d + 2 * d * d
    blocks = sum(d + KINDS[letter].numel(plain) for letter in "AF")
    return num_blocks(config.mtp) * (own + blocks)


def ngram_primes(ngram: NgramConfig) -> tuple[int, ...]:
    """Rows of each n-gram table: all of order 2, then all of order 3, ..."""
    return primes_from(ngram.table_size, ngram.heads * (ngram.max_order - 1))


def ngram_rows(ngram: NgramConfig) -> int:
    """Rows of all n-gram tables together, rounded up so that usual numbers of ranks divide them."""
    return -(-sum(ngram_primes(ngram)) // NGRAM_ROWS) * NGRAM_ROWS


def ngram_width(ngram: NgramConfig) -> int:
    """Numbers that all n-gram tables have for a token."""
    return ngram.heads * (ngram.max_order - 1) * ngram.dim


def _connection(config: ModelConfig) -> int:
    """Parameters of hyper-connections around one layer."""
    n = config.mhc.streams
    return (n * n + 2 * n) * (n * config.dim + 1) + 3 if n > 1 else 0


def idle_parameters(config: ModelConfig) -> int:
    """Parameters of experts that a token doesn't visit, of all layers."""
    e, layers = config.moe, sum(kind[0] == "E" for kind in layer_kinds(config))
    each = (3 if e.activation == "swiglu" else 2) * config.dim * e.hidden_dim
    return layers * (e.num_experts - e.top_k) * each


def projected_width(width: int, ratio: float) -> int:
    """Return the dims that `recompute.compress` keeps of an input of `width` dims."""
    return max(1, round(width * ratio))
