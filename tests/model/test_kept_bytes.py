"""What A and F blocks keep for backward, byte for byte, against a count by hand.

Counted: storages alive after a forward while only the graph is held, made inside of it or the
block's input. Not counted: parameters, and the rotary table, which all layers share.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.lessons.kept import GQA, MODEL, D, kept_per_token
from megacpp.model.regions import Region

MLA = AttentionConfig(
    kind="mla",
    num_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
RSTD = LSE = 4  # bytes of a norm's 1 / rms and of a softmax's log denominator, always fp32

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def of_norm(dtype: torch.dtype) -> int:
    """The residual stream as it came, 1 / rms, and what the projections take."""
    return 2 * D * dtype.itemsize + RSTD


def of_gqa(attention: AttentionConfig, dtype: torch.dtype) -> int:
    """q, k, v and o; with norms on q and k, both of them before that."""
    heads, kv, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    core = (2 * heads + 2 * kv) * dim * dtype.itemsize + LSE * heads
    normed = (heads + kv) * (dim * dtype.itemsize + RSTD)
    return core + (normed if attention.qk_norm else 0)


def of_mla(attention: AttentionConfig, dtype: torch.dtype) -> int:
    """Latents before and after their norms, then q, k, v and o of all heads."""
    a = attention
    query, latent = a.qk_nope_head_dim + a.qk_rope_head_dim, a.kv_lora_rank + a.qk_rope_head_dim
    latents = 2 * a.q_lora_rank + latent + a.kv_lora_rank
    core = a.num_heads * (2 * query + 2 * a.v_head_dim)
    norms = RSTD * (2 if a.q_lora_rank else 1)
    return (latents + core) * dtype.itemsize + norms + LSE * a.num_heads


@every_dtype
@pytest.mark.parametrize(
    "attention",
    [
        GQA,
        replace(GQA, qk_norm=True),
        replace(GQA, num_kv_heads=2),
        replace(GQA, softcap=3.0),
        replace(GQA, num_heads=6, qk_norm=True, softcap=3.0),
    ],
    ids=["gqa", "norm", "two_kv_heads", "softcap", "norm_softcap"],
)
def test_a_grouped_query_block(attention: AttentionConfig, dtype: torch.dtype) -> None:
    model = replace(MODEL, attention=attention)
    assert kept_per_token("A", model, dtype) == of_norm(dtype) + of_gqa(attention, dtype)


@every_dtype
@pytest.mark.parametrize(
    "attention",
    [
        MLA,
        replace(MLA, q_lora_rank=0),
        replace(MLA, v_head_dim=48),
        replace(MLA, v_head_dim=80),
        replace(MLA, softcap=3.0),
    ],
    ids=["mla", "direct_queries", "one_head_dim", "wide_values", "softcap"],
)
def test_a_latent_block(attention: AttentionConfig, dtype: torch.dtype) -> None:
    model = replace(MODEL, attention=attention)
    assert kept_per_token("A", model, dtype) == of_norm(dtype) + of_mla(attention, dtype)


@every_dtype
@pytest.mark.parametrize(("activation", "hiddens"), [("swiglu", 2), ("relu2", 1)])
def test_a_feed_forward_block(activation: str, hiddens: int, dtype: torch.dtype) -> None:
    mlp = MLPConfig(hidden_dim=896, activation=activation)  # type: ignore[arg-type]
    hidden = hiddens * mlp.hidden_dim * dtype.itemsize
    assert kept_per_token("F", replace(MODEL, mlp=mlp), dtype) == of_norm(dtype) + hidden


def test_a_dense_layer_keeps_27_bytes_per_token_channel() -> None:
    """bf16, F = 3.5 D, kv = D / 4: 27 by count and a little for 1 / rms and the softmax."""
    kept = kept_per_token("AF", MODEL, torch.bfloat16) / D
    assert kept == 27.0 + (2 * RSTD + 4 * LSE) / D
    assert kept < 30.0


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("regions", "kept"),
    [
        (("norm",), 23.0 + 4 * LSE / D),  # what projections read; norms of q and k leave nothing
        (("norm", "mlp"), 9.0 + 4 * LSE / D),  # gate and up too
        (("norm", "mlp", "core_attn"), 7.0),  # o too
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_pieces_that_run_again_keep_their_arguments(
    regions: tuple[Region, ...], kept: float, qk_norm: bool
) -> None:
    model = replace(MODEL, attention=replace(GQA, qk_norm=qk_norm))
    assert kept_per_token("AF", model, torch.bfloat16, regions) / D == kept


@pytest.mark.parametrize(
    "attention", [MLA, replace(MLA, v_head_dim=48)], ids=["two_head_dims", "one_head_dim"]
)
def test_latent_attention_can_keep_its_latents_alone(attention: AttentionConfig) -> None:
    """C + R of keys and values, R of the rotated key, the queries' latent: nothing has heads."""
    latents = MLA.q_lora_rank + MLA.kv_lora_rank + 2 * MLA.qk_rope_head_dim
    regions: tuple[Region, ...] = ("norm", "mla_q_upproj", "mla_kv", "core_attn")
    kept = kept_per_token("A", replace(MODEL, attention=attention), torch.bfloat16, regions)
    assert kept == (D + latents) * 2
    normed = kept_per_token("A", replace(MODEL, attention=attention), torch.bfloat16)
    heads = MLA.num_heads * (MLA.qk_nope_head_dim + MLA.qk_rope_head_dim + attention.v_head_dim)
    latent = kept_per_token("A", replace(MODEL, attention=attention), torch.bfloat16, ["mla_kv"])
    assert normed - latent == 2 * (heads - MLA.qk_rope_head_dim)
