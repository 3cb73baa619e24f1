"""Which pieces of which block run again in backward: the policy, layer by layer; no torch here."""

from __future__ import annotations

from typing import Literal

from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import CheckpointingPolicy, ModelConfig
from megacpp.model.pattern import block_letters

Piece = Literal[
    "block",  # all of a block: norm, mixer, sum; of one in hyper-connections norm and mixer
    "connected",  # all of a block in hyper-connections; never runs again as a whole
    "read_streams",  # what hyper-connections read of their streams, and coefficients
    "mix_streams",  # the streams behind a layer
    "norm",  # an RMSNorm
    "core_attn",  # softmax(q k^T) v
    "mla_q_upproj",  # latent to the queries of all heads
    "mla_kv",  # latent to the keys and values of all heads
    "mlp",  # gate and up of a dense feed-forward or shared expert, and their product
    "expert_gemm",  # the routed experts' rows, gate and up, and their product
    "engram",  # n-gram memory: projections, gate, norm, convolution, sums; not what it looked up
    "conv_bc",  # Mamba: short convolution, norms and biases of B and C, rotation, gate
]

NOTHING: frozenset[Piece] = frozenset()
BLOCK: frozenset[Piece] = frozenset({"block"})


def pieces_of(policy: CheckpointingPolicy, model: ModelConfig, letter: str) -> frozenset[Piece]:
    """What a block of `letter` runs again, unless it is the last."""
    kind = KINDS[letter]
    if kind.whole and getattr(policy, kind.whole) in ("full", "full_plus_norms"):
        return BLOCK
    found: set[Piece] = {"norm"} if policy.norms else set()
    return frozenset(found | kind.regions(policy, model))


def layer_pieces(policy: CheckpointingPolicy, model: ModelConfig) -> list[frozenset[Piece]]:
    """What each layer runs again; the last one never does, its backward comes at once."""
    letters = block_letters(model.pattern, model.depth)
    return [*(pieces_of(policy, model, letter) for letter in letters[:-1]), NOTHING]
