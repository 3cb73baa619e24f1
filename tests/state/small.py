"""Hybrid model of every block letter, small enough for a test."""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.config.schema import ModelConfig
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.state.tensors import is_persistent

SMALL = ModelConfig(
    dim=16,
    depth=5,
    pattern="AEMRF",
    vocab_size=40,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    mamba3=Mamba3Config(d_state=8, headdim=8, chunk_size=8),
    m2rnn=M2RNNConfig(key_dim=8, value_dim=4, chunk_size=8),
    moe=MoEConfig(num_experts=4, hidden_dim=8, shared_hidden_dim=8),
    mlp=MLPConfig(hidden_dim=24),
)


def build(config: ModelConfig, seed: int = 1, dtype: torch.dtype = torch.float32) -> HybridLM:
    """Return an initialised model whose persistent buffers aren't zero."""
    model = HybridLM(config).to(dtype)
    initialise(model, model.init_rules(), seed)
    for name, buffer in model.named_buffers():
        if is_persistent(model, name):
            buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape))
    return model


def loss(model: HybridLM) -> Tensor:
    ids_BT = torch.arange(24).view(2, 12) % model.config.vocab_size
    with torch.no_grad():
        return model(ids_BT, ids_BT.roll(-1, 1)).loss_sum
