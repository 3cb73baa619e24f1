"""Multi-head latent attention against DeepSeek-V3: outputs, gradients, frequencies, scale."""

from __future__ import annotations

from dataclasses import replace

import torch

from megacpp.blocks.attention.config import AttentionConfig, YarnConfig
from megacpp.blocks.attention.mla import LATENT_EPS, MultiHeadLatentAttention
from megacpp.blocks.attention.rope import inverse_frequencies
from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import Kernels
from tests.golden.harness import GoldenFile

KNOWN = ("mla_*.safetensors",)
SKIP = ("*_cp*.safetensors",)


def model_config(stored: dict) -> ModelConfig:
    """Our configuration from the stored one; every stored key is used."""
    stored = dict(stored)
    yarn, max_seq_len = dict(stored.pop("yarn") or {}), AttentionConfig.max_seq_len
    if yarn:
        max_seq_len = yarn.pop("max_seq_len")
    assert stored.pop("eps") == LATENT_EPS
    dim, num_heads = stored.pop("dim"), stored.pop("n_heads")
    attention = AttentionConfig(
        kind="mla",
        num_heads=num_heads,
        yarn=YarnConfig(**yarn) if yarn else None,
        max_seq_len=max_seq_len,
        **stored,
    )
    return replace(ModelConfig(), dim=dim, attention=attention)


BACKENDS = ("torch", "reference")  # of `attention`, that run on a CPU


def check(golden: GoldenFile) -> None:
    for backend in BACKENDS:
        check_backend(golden, backend)


def check_backend(golden: GoldenFile, backend: str) -> None:
    """The block with its attention by one backend."""
    config = model_config(golden.config)
    mla = MultiHeadLatentAttention(config).to(golden.dtype)
    mla.inner.kernels = Kernels(attention=backend)
    with torch.no_grad():
        for name, parameter in mla.named_parameters():
            parameter.copy_(golden.input(f"param.{name}"))
    x = golden.input("x", grad=True)
    y = mla(x, golden.documents())
    y.backward(golden.input("d_y"))
    golden.expect("y", y)
    golden.expect("grad.x", x.grad)
    for name, parameter in mla.named_parameters():
        golden.expect(f"grad.{name}", parameter.grad)
    rope_dim = config.attention.qk_rope_head_dim
    golden.expect("rope_angle_per_pos", inverse_frequencies(rope_dim, config.attention))
    scale = torch.tensor([mla.inner.scale], dtype=torch.float64)
    # Stored as an fp64 tensor, but rounded to fp32 on the way: half a unit in the last place.
    golden.expect_within("softmax_scale", scale, limit=mla.inner.scale * 2.0**-24)
