"""Small models: every letter and every option of a block, in milliseconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from megacpp.blocks.attention.config import AttentionConfig, SparseAttentionConfig, YarnConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.gated_deltanet.config import GatedDeltaNetConfig
from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.top.config import TOPConfig
from megacpp.config.arguments import replace_keys
from megacpp.config.presets import PRESETS, preset
from megacpp.config.schema import Config, MeshConfig, ModelConfig

# Sizes only: a preset keeps its pattern, its options and its ties.
SMALL_ATTENTION = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
SMALL_MAMBA3 = {"d_state": 8, "headdim": 8, "chunk_size": 4}
SMALL_M2RNN = {"key_dim": 6, "value_dim": 4, "chunk_size": 4}
SMALL_DELTA = {
    "num_key_heads": 2,
    "num_value_heads": 4,
    "key_dim": 6,
    "value_dim": 4,
    "chunk_size": 4,
}
SMALL_ENGRAM = EngramConfig(layers="all", heads=2, table_size=20, dim=8, conv_kernel=2)
SMALL_MOE = {"num_experts": 4, "top_k": 2, "hidden_dim": 12, "shared_hidden_dim": 20}
SPARSE = SparseAttentionConfig(layers="all", top_k=3, num_heads=3, head_dim=6)


def small(pattern: str = "AMERF", **changes: object) -> ModelConfig:
    """Return one layer of each letter of `pattern`, all sizes different so that mix-ups show."""
    base = ModelConfig(
        dim=16,
        depth=len(pattern),
        pattern=pattern,
        vocab_size=50,
        attention=AttentionConfig(**SMALL_ATTENTION, qk_norm=True),  # type: ignore[arg-type]
        mamba3=Mamba3Config(**SMALL_MAMBA3),  # type: ignore[arg-type]
        m2rnn=M2RNNConfig(**SMALL_M2RNN),  # type: ignore[arg-type]
        gated_deltanet=GatedDeltaNetConfig(**SMALL_DELTA),  # type: ignore[arg-type]
        moe=MoEConfig(**SMALL_MOE),  # type: ignore[arg-type]
        mlp=MLPConfig(hidden_dim=24),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def variants() -> dict[str, ModelConfig]:
    """Return models with every option that adds, removes or reshapes a parameter or buffer."""
    base, replace = small(), dataclasses.replace
    gqa, moe = base.attention, base.moe
    mla = replace(gqa, kind="mla", qk_norm=False)
    yarn = YarnConfig(4, 8.0, beta_fast=4, beta_slow=1, mscale=0.0, ramp="turns")
    biased = replace(gqa, qk_norm_wide=True, qkv_bias=True, output_gate=True, window=5)
    biased = replace(biased, full_layers="1", rope_fraction=0.5, max_seq_len=64, yarn=yarn)
    chosen = replace(mla, q_lora_rank=7, sparse=replace(SPARSE, share=2))
    narrow = replace(mla, q_lora_rank=7, yarn=YarnConfig(original_seq_len=4), max_seq_len=64)
    mimo = replace(base.mamba3, mimo_rank=2, ngroups=2, out_norm=True, conv_kernel=4)
    groups = replace(moe, activation="relu2", shared_gate=True, num_groups=2, num_shared=2)
    ungated = replace(base.gated_deltanet, gate=False, allow_neg_eigval=True)
    ngram = NgramConfig(heads=2, table_size=20, dim=3)
    return {
        "plain": base,
        "tied": replace(base, tie_embeddings=True),
        "mla": replace(base, attention=mla),
        "mla_low_rank_queries_yarn": replace(base, attention=narrow),
        "mla_sparse": layers(base, "AAMERF", attention=chosen),
        "gqa_sparse": replace(base, attention=replace(gqa, sparse=SPARSE)),
        "gqa_bias": layers(base, "AAMERF", post_norm=True, attention=biased),
        "mamba_mimo_norm_conv": replace(base, mamba3=mimo),
        "m2rnn_heads": replace(base, m2rnn=replace(base.m2rnn, num_heads=4, num_q_heads=2)),
        "moe_relu2_gate_groups": replace(base, moe=groups),
        "moe_softmax_no_shared": replace(base, moe=replace(moe, score="softmax", num_shared=0)),
        "engram": small("AEA", engram=SMALL_ENGRAM),
        "moe_nulls": replace(base, moe=replace(moe, null_rho=0.5)),
        "gated_deltanet": small("GAGE"),
        "gated_deltanet_ungated": small("GE", gated_deltanet=ungated),
        "mlp_relu2": replace(base, mlp=MLPConfig(hidden_dim=24, activation="relu2")),
        "top_ngram": replace(base, top=TOPConfig(0.3, window=5), ngram=ngram),
    }


def layers(model: ModelConfig, pattern: str, **changes: Any) -> ModelConfig:
    """Return a model with a layer for each letter of `pattern`, and with other changes."""
    return dataclasses.replace(model, pattern=pattern, depth=len(pattern), **changes)


def shrunk(name: str) -> ModelConfig:
    """Return a preset's model with its pattern, options and ties, but small."""
    model = PRESETS[name]().model
    replace = dataclasses.replace
    sparse = model.attention.sparse
    if sparse.layers:
        sparse = replace(sparse, layers="1,2", top_k=3, num_heads=2, head_dim=6)
    return replace(
        model,
        dim=16,
        depth=min(model.depth, len(model.pattern)),
        vocab_size=50,
        attention=replace(model.attention, **SMALL_ATTENTION, sparse=sparse),  # type: ignore[arg-type]
        mamba3=replace(model.mamba3, **{**SMALL_MAMBA3, "ngroups": 2}),  # type: ignore[arg-type]
        m2rnn=replace(model.m2rnn, **SMALL_M2RNN),  # type: ignore[arg-type]
        gated_deltanet=replace(model.gated_deltanet, **SMALL_DELTA),  # type: ignore[arg-type]
        moe=replace(model.moe, **SMALL_MOE),  # type: ignore[arg-type]
        mlp=replace(model.mlp, hidden_dim=24),
        mtp=replace(model.mtp, hidden_dim=24),
        ngram=replace(model.ngram, table_size=20, dim=3),
        engram=replace(SMALL_ENGRAM, layers="1" if model.engram.layers else ""),
    )


def config_of(name: str, mesh: dict[str, object], others: dict[str, object]) -> Config:
    """Return a preset on a mesh, with other settings by their keys."""
    config = dataclasses.replace(preset(name), mesh=MeshConfig(**mesh))  # type: ignore[arg-type]
    return replace_keys(config, others)
