"""Attention blocks of every kind, packed documents, inputs, and what stands for a GPU's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention, varlen

from megacpp.blocks.attention.config import AttentionConfig, YarnConfig
from megacpp.blocks.attention.gqa import GroupedQueryAttention
from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.config.schema import ModelConfig
from megacpp.kernels.attention import flex as attention_flex
from megacpp.model.documents import Documents
from megacpp.model.init import Constant, Normal, initialise

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


@contextmanager
def flex_on_a_cpu() -> Iterator[None]:
    """flex_attention by its definition, with gradients."""
    with (
        mock.patch.object(flex_attention, "_validate_device", lambda *tensors: None),
        mock.patch.object(attention_flex, "fused", lambda: flex_attention.flex_attention),
    ):
        yield


@contextmanager
def varlen_on_a_cpu() -> Iterator[list[list[int]]]:
    """varlen_attn, one document after another; the boundaries that it was given."""
    given: list[list[int]] = []

    def one_by_one(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
    ) -> Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and k.shape == v.shape
        grouped = q.shape[1] != k.shape[1]
        # torch 2.11 isn't told of groups: it has no such argument.
        (left, right), mask = window_size, None
        assert right == 0
        assert enable_gqa == (grouped and torch.__version__ >= "2.12")
        assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
        given.append(cu_seq_q.tolist())
        parts = []
        for start, end in zip(given[-1][:-1], given[-1][1:], strict=True):
            assert 0 <= end - start <= min(max_q, max_k)
            own_q, own_k, own_v = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            if left >= 0:
                mask = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(-left)
            o = F.scaled_dot_product_attention(
                own_q, own_k, own_v, mask, is_causal=left < 0, scale=scale, enable_gqa=grouped
            )
            parts.append(o[0].transpose(0, 1))
        return torch.cat(parts)

    with mock.patch.object(varlen, "varlen_attn", one_by_one):
        yield given
