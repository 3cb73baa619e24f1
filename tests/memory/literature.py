"""Memory formulas of the literature, to compare with the estimate of the real trainer.

They come from public articles on training hybrids and from Korthikanti et al. (arXiv 2205.05198).
They are quick, and wrong in ways that tests/memory/test_reference.py shows. No torch import here.
"""

from __future__ import annotations

import math

BYTES_OF_A_LAYER = 34  # of a token and channel: GELU, dropout, bf16, no attention scores
ADAMW_BYTES, MUON_BYTES = 8, 2  # of optimizer state, per parameter


def transformer_activations(
    batch: int, tokens: int, dim: int, layers: int, itemsize: int = 2
) -> int:
    """Return activation bytes of a model whose layers are all one kind of dense block.

    A layer takes 34 bytes per token and channel in bf16.

    Args:
        batch: rows of the microbatch.
        tokens: tokens of a row.
        dim: channels of the model.
        layers: number of layers.
        itemsize: bytes of an element.
    """
    return batch * tokens * dim * BYTES_OF_A_LAYER * layers * itemsize // 2


def hybrid_activations(
    batch: int, tokens: int, dim: int, layers: int, mamba_layers: int, itemsize: int = 2
) -> int:
    """Return activation bytes of a hybrid model, where an M layer counts as two dense layers.

    The formula omits the chunks of states and scores that a scan stores.

    Args:
        batch: rows of the microbatch.
        tokens: tokens of a row.
        dim: channels of the model.
        layers: number of layers, M layers included.
        mamba_layers: number of M layers.
        itemsize: bytes of an element.
    """
    counted = layers + mamba_layers
    return transformer_activations(batch, tokens, dim, counted, itemsize)


def expert_capacity(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Return the slots (rows) of one expert.

    Args:
        tokens: tokens that are routed.
        top_k: experts of a token.
        num_experts: experts in all.
        capacity_factor: slots over an even share of the tokens.
    """
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
    """Return bytes of the inputs and outputs of one rank's experts, for one layer.

    Args:
        tokens: tokens that are routed.
        dim: channels of a row.
        top_k: experts of a token.
        num_experts: experts in all.
        capacity_factor: slots over an even share of the tokens.
        ep: degree of expert parallelism.
        itemsize: bytes of an element.
    """
    slots = num_experts // ep * expert_capacity(tokens, top_k, num_experts, capacity_factor)
    return 2 * slots * dim * itemsize


def router_bytes(tokens: int, num_experts: int) -> int:
    """Return bytes of one layer's router logits in fp32, which grow with the number of experts."""
    return tokens * num_experts * 4


def optimizer_state(parameters: int, muon_share: float = 0.0) -> int:
    """Return bytes of optimizer state: AdamW's moments in fp32, Muon's momentum in bf16."""
    muon = round(parameters * muon_share)
    return ADAMW_BYTES * (parameters - muon) + MUON_BYTES * muon
