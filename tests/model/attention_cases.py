"""Attention blocks of every kind, packed documents and inputs for the tests of attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megacpp.config import AttentionConfig, ModelConfig, YarnConfig
from megacpp.model.attention import GroupedQueryAttention
from megacpp.model.documents import Documents
from megacpp.model.init import Constant, Normal, initialise
from megacpp.model.mla import MultiHeadLatentAttention

SAME_FORMULA = 1e-12
LENGTHS = ((7, 1, 12, 3), (1, 1, 20, 1))  # documents of two packed rows of 23 tokens

GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
MLA = AttentionConfig(
    kind="mla",
    num_heads=3,
    q_lora_rank=10,
    kv_lora_rank=6,
    qk_nope_head_dim=5,  # odd: the rotary part starts at an odd column
    qk_rope_head_dim=4,
    v_head_dim=6,
)
KINDS = {
    "gqa": GQA,
    "gqa_norm": replace(GQA, qk_norm=True),
    "gqa_softcap": replace(GQA, softcap=2.0),
    "gqa_one_kv_head": replace(GQA, num_kv_heads=1, qk_norm=True, softcap=2.0),
    "gqa_yarn": replace(GQA, max_seq_len=64, yarn=YarnConfig(original_seq_len=16, factor=4.0)),
    "mla": MLA,
    "mla_softcap": replace(MLA, softcap=2.0),
    "mla_direct_queries": replace(MLA, q_lora_rank=0),
    "mla_wide_values": replace(MLA, v_head_dim=11),
}


def mixer(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A mixer with weights large enough that attention is far from uniform, and uneven norms."""
    config = ModelConfig(dim=16, depth=2, init_std=0.4, attention=KINDS[kind])
    mla = config.attention.kind == "mla"
    made = MultiHeadLatentAttention(config) if mla else GroupedQueryAttention(config)
    rules = {
        name: Normal(1.0) if isinstance(rule, Constant) else rule
        for name, rule in made.init_rules().items()
    }
    made.double()
    initialise(made, rules, seed=3)
    return made if dtype == torch.float64 else made.float().to(dtype)


def packed(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Documents:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return Documents.from_ids(torch.stack(rows))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(got: Tensor, want: Tensor, limit: float = SAME_FORMULA) -> None:
    error = (got - want).abs().max().item()
    assert error <= limit * max(1.0, want.abs().max().item()), f"{error:.2e}"
