"""Attention layers whose logits are large, for the tests of QK-clip."""

from __future__ import annotations

import dataclasses

from megacpp.blocks.attention.config import AttentionConfig, YarnConfig
from megacpp.config.schema import ModelConfig
from tests.model.small import small

GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6)
MLA = AttentionConfig(
    kind="mla",
    num_heads=2,
    q_lora_rank=10,
    kv_lora_rank=6,
    qk_nope_head_dim=5,  # odd, and heads of 9 rows: shards cut inside them
    qk_rope_head_dim=4,
    v_head_dim=7,
)
YARN = YarnConfig(original_seq_len=8, factor=4.0)
ATTENTION = {
    "gqa": GQA,
    "gqa_one_kv_head": dataclasses.replace(GQA, num_kv_heads=1),
    "gqa_softcap": dataclasses.replace(GQA, softcap=2.0),
    "gqa_yarn": dataclasses.replace(GQA, max_seq_len=64, yarn=YARN),
    "gqa_eight_heads": dataclasses.replace(GQA, num_heads=8, num_kv_heads=4),
    "mla": MLA,
    "mla_direct_queries": dataclasses.replace(MLA, q_lora_rank=0, num_heads=3),
}


def model_config(attention: str) -> ModelConfig:
    """Two attention layers, all logits large and of every head different."""
    return small("AFA", attention=ATTENTION[attention], vocab_size=48, init_std=0.4)
