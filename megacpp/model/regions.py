"""Recompute regions of each layer under a policy; no torch here."""

from __future__ import annotations

from typing import Literal

from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import CheckpointingPolicy, ModelConfig
from megacpp.model.pattern import block_letters

Region = Literal[
    "block",  # a whole block: norm, mixer, sum; with hyper-connections norm and mixer
    "connected",  # a whole block with hyper-connections; never recomputed as a whole
    "read_streams",  # input that hyper-connections mix from their streams, and coefficients
    "mix_streams",  # streams behind a layer
    "norm",  # one RMSNorm
    "gather",  # a mixer's input, of all tokens of the ranks of `tp`; sends them again
    "core_attn",  # softmax(q k^T) v
    "mla_q_upproj",  # latent to the queries of all heads
    "mla_kv",  # latent to the keys and values of all heads
    "mlp",  # gate and up of a dense feed-forward or shared expert, and their product
    "expert_gemm",  # the routed experts' rows, gate and up, and their product
    "engram",  # n-gram memory: projections, gate, norm, convolution, sums; not the looked-up rows
    "conv_bc",  # Mamba: short convolution, norms and biases of B and C, rotation, gate
]

COMPILED_BUDGET = 0.5  # of compiled blocks, where a policy recomputes anything
NOTHING: frozenset[Region] = frozenset()
BLOCK: frozenset[Region] = frozenset({"block"})


def regions_of(policy: CheckpointingPolicy, model: ModelConfig, letter: str) -> frozenset[Region]:
    """Return the regions that a block of kind `letter` recomputes, unless it is the last layer."""
    kind = KINDS[letter]
    if kind.whole and getattr(policy, kind.whole) in ("full", "full_plus_norms"):
        return BLOCK
    found: set[Region] = {"norm"} if policy.norms else set()
    if policy.regather == "on" or (policy.regather == "auto" and policy.norms):
        found.add("gather")
    return frozenset(found | kind.regions(policy, model))


def layer_regions(policy: CheckpointingPolicy, model: ModelConfig) -> list[frozenset[Region]]:
    """Return each layer's recomputed regions; none of the last, whose backward follows at once."""
    letters = block_letters(model.pattern, model.depth)
    return [*(regions_of(policy, model, letter) for letter in letters[:-1]), NOTHING]


def compiled_budget(policy: CheckpointingPolicy, model: ModelConfig) -> float:
    """Return the part of its usual activations that a compiled block keeps, 0 to 1.

    The compiler replaces the policy's regions; a policy that recomputes anything is still a wish
    for memory, so it becomes a budget below 1.
    """
    if policy.activation_memory_budget >= 0:
        return policy.activation_memory_budget
    return COMPILED_BUDGET if any(layer_regions(policy, model)) else 1.0
