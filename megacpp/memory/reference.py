"""Formulas that the field reckons with, to set beside the estimate of the real trainer.

They come from public articles on training hybrids and from Korthikanti et al. (arXiv 2205.05198):
quick, and wrong in ways that are worth knowing (tests/memory/test_reference.py says how).
No torch import here.
"""

from __future__ import annotations

import math

BYTES_OF_A_LAYER = 34  # of a token and channel: GELU, dropout, bf16, no attention scores
ADAMW_BYTES, MUON_BYTES = 8, 2  # of optimizer state, per parameter


def transformer_activations(
    batch: int, tokens: int, dim: int, layers: int, itemsize: int = 2
) -> int:
    """All layers as one kind of dense block: 34 bytes a token and channel in bf16."""
    return batch * tokens * dim * BYTES_OF_A_LAYER * layers * itemsize // 2


def hybrid_activations(
    batch: int, tokens: int, dim: int, layers: int, mamba_layers: int, itemsize: int = 2
) -> int:
    """The same, an M layer for two: a scan without its chunks of states and scores."""
    counted = layers + mamba_layers
    return transformer_activations(batch, tokens, dim, counted, itemsize)


def expert_capacity(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Slots of one expert."""
    return math.ceil(tokens * top_k * capacity_factor / num_experts)


def dispatch_bytes(
    tokens: int,
    dim: int,
    top_k: int,
    num_experts: int,
    capacity_factor: float,
    ep: int = 1,
    itemsize: int = 2,
) -> int:
    """Gathered inputs and outputs of the experts that a rank of `ep` holds, for one layer."""
    slots = num_experts // ep * expert_capacity(tokens, top_k, num_experts, capacity_factor)
    return 2 * slots * dim * itemsize


def router_bytes(tokens: int, num_experts: int) -> int:
    """Logits of one layer in fp32: the one line that grows with the number of experts."""
    return tokens * num_experts * 4


def optimizer_state(parameters: int, muon_share: float = 0.0) -> int:
    """AdamW's moments in fp32, Muon's momentum in bf16."""
    muon = round(parameters * muon_share)
    return ADAMW_BYTES * (parameters - muon) + MUON_BYTES * muon
