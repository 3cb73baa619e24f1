"""Small models, a class of Hugging Face each, and the final folders of their runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megacpp.blocks.attention.config import SparseAttentionConfig, YarnConfig
from megacpp.config.arguments import replace_keys
from megacpp.config.schema import Config, ModelConfig
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.model.hybrid import HybridLM
from megacpp.model.init import initialise
from megacpp.state.export import export_weights
from tests.model.small import small

SPARSE = SparseAttentionConfig(layers="all", top_k=6, num_heads=16, head_dim=8)
MLA = {"attention.kind": "mla", "attention.qk_norm": False, "attention.num_heads": 4}
LATENT = {**MLA, "attention.q_lora_rank": 12}
SOFTMAX = {"moe.score": "softmax"}
NO_NORM = {"attention.qk_norm": False}
YARN = YarnConfig(original_seq_len=16, factor=4.0, mscale=0.7)
TURNS = YarnConfig(16, 8.0, beta_fast=4, beta_slow=1, mscale=0.0, ramp="turns")
WIDE = {"attention.max_seq_len": 64}

# name -> (class, pattern, settings below `model`)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "AFAF", NO_NORM),
    "llama_tied_yarn": (
        "Llama",
        "AFAF",
        {**NO_NORM, **WIDE, "tie_embeddings": True, "attention.yarn": YARN},
    ),
    "llama3": ("Llama", "AFAF", {**NO_NORM, **WIDE, "attention.yarn": TURNS}),
    "qwen2": ("Qwen2", "AFAF", {**NO_NORM, "attention.qkv_bias": True}),
    "mistral": ("Mistral", "AFAF", {**NO_NORM, "attention.window": 17}),
    "arcee": ("Arcee", "AFAF", {**NO_NORM, "mlp.activation": "relu2"}),
    "qwen3_tied": ("Qwen3", "AFAF", {"tie_embeddings": True}),
    "qwen3_yarn": ("Qwen3", "AFAF", {**WIDE, "attention.yarn": YARN}),
    "qwen3_heads": ("Qwen3", "AFAF", {"attention.num_heads": 6}),
    "olmo2": ("Olmo2", "AFAF", {"attention.qk_norm_wide": True, "post_norm": True}),
    "olmo3": (
        "Olmo3",
        "AFAFAFAF",
        {
            "attention.qk_norm_wide": True,
            "post_norm": True,
            "attention.window": 17,
            "attention.full_layers": "every:4",
        },
    ),
    "olmo3_yarn": (
        "Olmo3",
        "AFAFAF",
        {
            **WIDE,
            "attention.qk_norm_wide": True,
            "post_norm": True,
            "attention.window": 9,
            "attention.full_layers": "0,2",
            "attention.yarn": YARN,
        },
    ),
    "olmoe": (
        "Olmoe",
        "AEAE",
        {**SOFTMAX, "attention.qk_norm_wide": True, "moe.num_shared": 0, "attention.head_dim": 6},
    ),
    "mixtral": ("Mixtral", "AEAE", {**SOFTMAX, **NO_NORM, "moe.num_shared": 0}),
    "mixtral_scaled": (
        "Mixtral",
        "AEAE",
        {**SOFTMAX, **NO_NORM, "moe.num_shared": 0, "moe.route_scale": 2.0},
    ),
    "qwen3_moe": ("Qwen3Moe", "AEAE", {**SOFTMAX, "moe.num_shared": 0}),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        "AFAEAFAE",
        {**SOFTMAX, "moe.num_shared": 0, "moe.softmax_order": "pre"},
    ),
    "granite": ("GraniteMoeShared", "AEAE", {**SOFTMAX, **NO_NORM}),
    "qwen2_moe": ("Qwen2Moe", "AEAF", {**SOFTMAX, **NO_NORM, "moe.shared_gate": True}),
    "qwen2_moe_ungated": ("Qwen2Moe", "AEAF", {**SOFTMAX, **NO_NORM}),
    "qwen2_moe_bias": (
        "Qwen2Moe",
        "AEAF",
        {**SOFTMAX, **NO_NORM, "attention.qkv_bias": True, "moe.shared_gate": True},
    ),
    "qwen3_next": ("Qwen3Next", "AEAE", SOFTMAX),
    "qwen3_next_gated": ("Qwen3Next", "AEAF", {**SOFTMAX, "moe.shared_gate": True}),
    "qwen3_next_published": (
        "Qwen3Next",
        "GEAE",
        {
            **SOFTMAX,
            "attention.rope_fraction": 0.25,
            "attention.output_gate": True,
            "moe.shared_gate": True,
        },
    ),
    "qwen3_next_delta": ("Qwen3Next", "GEGEAE", {**SOFTMAX, "attention.rope_fraction": 0.25}),
    "glm4": ("Glm4Moe", "AEAE", {"moe.num_groups": 2, "moe.route_scale": 2.5}),
    "glm4_bias": ("Glm4Moe", "AEAE", {"attention.qkv_bias": True}),
    "glm4_partial": (
        "Glm4Moe",
        "AFAE",
        {"attention.rope_fraction": 0.5, "attention.qkv_bias": True, "attention.num_heads": 6},
    ),
    "glm4_dense_first": ("Glm4Moe", "AFAEAE", NO_NORM),
    "glm4_unshared": ("Glm4Moe", "AEAE", {"moe.num_shared": 0}),
    "deepseek_v3": ("DeepseekV3", "AEAE", LATENT),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        "AFAEAE",
        {**MLA, **WIDE, "attention.yarn": YARN, "moe.num_groups": 2},
    ),
    "deepseek_v3_llama3": ("DeepseekV3", "AEAE", {**LATENT, **WIDE, "attention.yarn": TURNS}),
    "deepseek_v3_dense": ("DeepseekV3", "AFAF", MLA),
    "deepseek_v2": (
        "DeepseekV2",
        "AFAE",
        {**LATENT, **SOFTMAX, "moe.softmax_order": "pre", "moe.route_scale": 2.0},
    ),
    "deepseek_v32": ("DeepseekV32", "AFAE", {**LATENT, "attention.sparse": SPARSE}),
    "glm_dsa": (
        "GlmMoeDsa",
        "AFAEAEAE",
        {**LATENT, "attention.sparse": dataclasses.replace(SPARSE, share=2)},
    ),
}


def model_of(name: str) -> ModelConfig:
    """Return the settings of a case: every size another, so that mix-ups show."""
    _, pattern, changes = CASES[name]
    base = small(pattern, dim=24, vocab_size=300)
    values = {f"model.{key}": value for key, value in changes.items()}
    return replace_keys(dataclasses.replace(Config(), model=base), values).model


def built(model: ModelConfig, seed: int = 1) -> HybridLM:
    """Return a model whose norms, biases and gates are no constants."""
    found = HybridLM(model)
    initialise(found, found.init_rules(), seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in (*found.named_parameters(), *found.named_buffers()):
            if name.endswith(("norm.weight", "norm.bias")):
                t.copy_(0.75 + torch.rand(t.shape, generator=draws))
            elif name.endswith("expert_bias") and model.moe.score == "sigmoid":
                t.copy_(0.1 * torch.randn(t.shape, generator=draws))
            elif name.endswith(("wq.bias", "wk.bias", "wv.bias")):
                t.copy_(0.2 * torch.randn(t.shape, generator=draws))
            elif t.dim() > 1 and "conv" not in name:
                t.mul_(6)
    return found.eval()


def tokenizer() -> CorpusTokenizer:
    """Return a tokenizer of 300 ids or fewer, learned from this file."""
    text = Path(__file__).read_text()
    return CorpusTokenizer.train([text.splitlines(keepends=True)], 300)


def final_folder(folder: Path, model: HybridLM) -> Path:
    """Write a model as a run writes its final weights, with a tokenizer; return the folder."""
    folder.mkdir(parents=True)
    path = folder / "tokenizer.json"
    tokenizer().save(path)
    beside = (path, path.with_name("tokenizer_config.json"))
    export_weights(model, folder / "final", model.config, beside=beside, step=7)
    return folder / "final"
