"""Sparse MLA blocks against DeepSeek-V3.2 as transformers has it: choice, outputs, gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megacpp.blocks.attention.config import AttentionConfig, SparseAttentionConfig
from megacpp.blocks.attention.sparse import SparseLatentAttention, noted_choice
from megacpp.config.schema import ModelConfig
from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.sparse_attention.indexer import index_scores
from megacpp.kernels.sparse_attention.reference import chosen_mask
from megacpp.model.documents import Documents
from megacpp.model.init import Constant, initialise
from tests.golden.harness import GoldenFile

KNOWN = ("dsa_mla_attention*.safetensors",)
NAMES = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}


def model_config(stored: dict) -> ModelConfig:
    """Our configuration from the stored one; every stored key is used."""
    stored = dict(stored)
    sparse = SparseAttentionConfig(
        layers="all",
        num_heads=stored.pop("index_heads"),
        head_dim=stored.pop("index_dim"),
        top_k=stored.pop("topk"),
    )
    dim = stored.pop("dim")
    attention = AttentionConfig(
        kind="mla",
        num_heads=stored.pop("n_heads"),
        q_lora_rank=stored.pop("q_lora_rank"),
        kv_lora_rank=stored.pop("kv_lora_rank"),
        qk_nope_head_dim=stored.pop("nope"),
        qk_rope_head_dim=stored.pop("rope"),
        v_head_dim=stored.pop("v"),
        rope_theta=10_000.0,
        sparse=sparse,
    )
    assert not stored, stored
    return replace(ModelConfig(), dim=dim, depth=1, pattern="A", attention=attention)


def stored_name(ours: str) -> str:
    first, _, rest = ours.partition(".")
    return ours if first == "indexer" else f"{NAMES[first]}.{rest}"


def check(golden: GoldenFile) -> None:
    config = model_config(golden.config)
    mixer = SparseLatentAttention(config, "A.index", 0).to(golden.dtype)
    initialise(mixer, dict.fromkeys(mixer.init_rules(), Constant(0.0)), seed=0)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.copy_(golden.input(f"param.{stored_name(name)}"))
    x = golden.input("x", grad=True)
    docs = golden.documents() or Documents.rows(*x.shape[:2], x.device)
    y = mixer(x, docs)
    y.backward(golden.input("d_y"))
    golden.expect("y", y)
    golden.expect("grad.x", x.grad)
    for name, parameter in mixer.named_parameters():
        if not name.startswith("indexer."):  # no gradient of the output reaches it
            golden.expect(f"grad.{stored_name(name)}", parameter.grad)
        elif parameter.grad is not None:
            assert not parameter.grad.any(), name
    chosen: Tensor = noted_choice(docs, 0)
    golden.expect("topk_mask", chosen_mask(chosen, x.shape[1]))
    with torch.no_grad():
        assert mixer.indexer is not None
        latent = mixer.q_norm(mixer.query_latent(x))
        # Stored for all pairs, with positions in the row: the same where both are in a document.
        row = Documents.rows(x.shape[0], x.shape[1], x.device)
        of_row, of_docs = (index_scores(*mixer.indexer(x, latent, d)) for d in (row, docs))
        visible = document_mask(docs, docs)[:, 0]
        golden.expect("index_scores", torch.where(visible, of_docs, of_row))
