"""FLOPs per token, counted from the configuration: two per multiply-add of a matrix product.

The convention of MFU (PaLM, arXiv 2204.02311, appendix B): forward plus twice forward for the
backward, attention over whole rows (causal masks and document boundaries save nothing here), no
recomputation, no element-wise work (a depthwise conv is that). tests/model/test_flops.py holds
it to FlopCounterMode.
"""

from __future__ import annotations

from megacpp.blocks.descriptor import AheadBlocks
from megacpp.blocks.features import FEATURES, ahead_blocks
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import layer_kinds, layer_model


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward FLOPs of one token in a row of `seq_len` tokens."""
    return 3.0 * (forward_flops_per_token(config, seq_len) + ahead_flops(config, seq_len))


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of one token in training: every block, the head, features beside them."""
    layers = sum(block_flops(kind, config, seq_len) for kind in layer_kinds(config))
    layers += config.depth * sum(connection_flops(config))
    return layers + 2.0 * (config.dim * config.vocab_size + feature_multiply_adds(config, ""))


def ahead_flops(config: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of one token on the way to tokens further ahead, which training alone runs."""
    head = 2.0 * config.dim * config.vocab_size
    found = ahead_blocks(config)
    return sum(blocks.passes * (pass_flops(blocks, seq_len) + head) for blocks in found)


def pass_flops(blocks: AheadBlocks, seq_len: int) -> float:
    """Forward FLOPs of one token in one of the blocks behind the last layer."""
    mixers = sum(block_flops(letter, blocks.model, seq_len) for letter in blocks.letters)
    return 2.0 * blocks.multiply_adds + mixers


def block_flops(kind: str, config: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of one token in one block of a kind (`layer_kinds`)."""
    own = KINDS[kind[0]].multiply_adds(layer_model(config, kind), seq_len)
    chosen = indexer_flops(config, seq_len) if "A.index" in kind else 0.0
    return 2.0 * (own + feature_multiply_adds(config, kind)) + chosen


def indexer_flops(config: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of one token in an indexer: projections, and a score of every key of the row.

    Backward FLOPs are twice that, as of any product. Attention to chosen keys multiplies queries
    with all keys and masks the others, so it is counted as attention. The scores and logits that
    the indexer's loss computes again are not counted, as recomputation is not.
    """
    a, sparse, d = config.attention, config.attention.sparse, config.dim
    into = (a.q_lora_rank or d) if a.kind == "mla" else d
    width = sparse.num_heads * sparse.head_dim
    return 2.0 * (into * width + d * (sparse.head_dim + sparse.num_heads) + seq_len * width)


def connection_flops(config: ModelConfig) -> tuple[float, float]:
    """FLOPs of one token around one block: coefficients with the read, and streams behind it."""
    n, d = config.mhc.streams, config.dim
    if n == 1:
        return 0.0, 0.0
    return 2.0 * n * d * (n * n + 2 * n + 1), 2.0 * n * n * d


def feature_multiply_adds(config: ModelConfig, kind: str) -> float:
    """Multiply-adds of one token in the features of a kind of layer, or beside them (empty)."""
    return sum(f.multiply_adds(config, kind) for f in FEATURES.values() if f.present(config))
