"""Attention blocks of every kind, packed documents, inputs, and what stands for a GPU's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
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
from megacpp.kernels.attention import segments
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


class FlashOnACpu:
    """torch's flash operators for segments, one segment after another by its operators for CPUs.

    As on a GPU a query without a key gets the output 0 and the log-sum-exp +inf.

    Attributes:
        pairs: queries and keys of each segment of a forward that has both.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *settings: Any, scale: float
    ) -> tuple[Tensor, Tensor]:
        causal, o = settings[5], torch.zeros_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(q.shape[1::-1], float("inf"), dtype=wide)
        for rows, keys in self._each(q, k, *settings[:4], causal=causal):
            self.pairs.append((rows.stop - rows.start, keys.stop - keys.start))
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_heads_first(q[rows], *_repeated(q, k[keys], v[keys])), 0.0, causal, scale=scale
            )
            o[rows], lse[:, rows] = found[0][0].transpose(0, 1), found[1][0]
        return o, lse

    def _flash_attention_backward(
        self, *tensors_and_settings: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, v, o, lse, *settings = tensors_and_settings
        causal, (dq, dk, dv) = settings[5], (torch.zeros_like(x) for x in (q, k, v))
        for rows, keys in self._each(q, k, *settings[:4], causal=causal):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_heads_first(do[rows], q[rows], *_repeated(q, k[keys], v[keys]), o[rows]),
                lse[None, :, rows],
                0.0,
                causal,
                scale=scale,
            )
            of_rows, *of_keys = (d[0].transpose(0, 1) for d in found)
            dq[rows] = of_rows
            dk[keys], dv[keys] = (d.unflatten(1, (k.shape[1], -1)).sum(2) for d in of_keys)
        return dq, dk, dv

    def _each(
        self, q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, *longest: int, causal: bool
    ) -> list[tuple[slice, slice]]:
        found = []
        for ends, tokens in ((of_q, len(q)), (of_k, len(k))):
            assert ends.dtype == torch.int32 and (ends.diff() >= 0).all()
            assert ends[0] == 0 and ends[-1] == tokens
        for a, b in zip(pairwise(of_q.tolist()), pairwise(of_k.tolist()), strict=True):
            assert a[1] - a[0] <= longest[0] and b[1] - b[0] <= longest[1]
            assert a == b or not causal
            if a[0] < a[1] and b[0] < b[1]:
                found.append((slice(*a), slice(*b)))
        return found


@contextmanager
def segments_on_a_cpu() -> Iterator[FlashOnACpu]:
    """Flash kernels for segments without a GPU."""
    operators = FlashOnACpu()
    with mock.patch.object(segments, "OPERATORS", operators):
        yield operators


def _repeated(q: Tensor, *keys_values: Tensor) -> list[Tensor]:
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys_values]


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1)[None] for x in tensors]
