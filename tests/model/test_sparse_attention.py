"""Attention to chosen keys against masked softmax: fp64, 1e-12; documents, parts, live bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.kernels.attention import softcap as softcap_kernel
from megacpp.kernels.attention.causal import causal_attention
from megacpp.kernels.sparse_attention import reference as kernel
from megacpp.kernels.sparse_attention.indexer import choose_keys
from megacpp.kernels.sparse_attention.reference import chosen_mask, sparse_attention
from megacpp.model.documents import Documents
from tests.model.attention_cases import close, noise, packed


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of 23 queries, the last one ragged."""
    monkeypatch.setattr(kernel, "BLOCK", 8)
    monkeypatch.setattr(softcap_kernel, "BLOCK", 8)


def choice(docs: Documents, top_k: int = 4) -> Tensor:
    rows, tokens = docs.ids_BT.shape
    shapes = ((rows, tokens, 3, 8), (rows, tokens, 8), (rows, tokens, 3))
    q, k, w = (noise(*s, seed=20 + i) for i, s in enumerate(shapes))
    return choose_keys(q, k, w, docs, docs, top_k)


def operands(
    heads: tuple[int, int, int, int], rows: int = 2, tokens: int = 23
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as leaves."""
    num_q, num_kv, dim, value_dim = heads
    shapes = ((num_q, dim), (num_kv, dim), (num_kv, value_dim))
    q, k, v = (noise(rows, tokens, *s, seed=i).requires_grad_() for i, s in enumerate(shapes))
    return q, k, v


def naive(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float, softcap: float | None
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    logits = scale * torch.einsum("btnh,bsnh->bnts", q, k)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    mask_BTS = torch.zeros(*chosen.shape[:2], k.shape[1], dtype=torch.bool)
    for b, t in ((b, t) for b in range(chosen.shape[0]) for t in range(chosen.shape[1])):
        mask_BTS[b, t, [s for s in chosen[b, t].tolist() if s >= 0]] = True
    p = logits.masked_fill(~mask_BTS[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bnts,bsnv->btnv", p, v)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("docs", [packed(), Documents.rows(2, 23)], ids=["packed", "whole"])
@pytest.mark.parametrize(
    "heads",
    [(4, 4, 6, 6), (4, 2, 6, 6), (4, 1, 8, 5), (2, 2, 4, 7)],
    ids=lambda h: "-".join(map(str, h)),
)
def test_only_chosen_keys_are_attended_to(
    heads: tuple[int, int, int, int], docs: Documents, softcap: float | None
) -> None:
    qkv, chosen, d_o = operands(heads), choice(docs), noise(2, 23, heads[0], heads[3], seed=9)
    assert (chosen < 0).any()
    want = naive(*qkv, chosen, 0.7, softcap)
    want = (want, *torch.autograd.grad(want, qkv, d_o))
    got = sparse_attention(*qkv, chosen, docs, docs, 0.7, softcap)
    for a, b in zip((got, *torch.autograd.grad(got, qkv, d_o)), want, strict=True):
        close(a, b)
    index_T = torch.tensor([0, 3, 4, 8, 9, 10, 16, 17, 20, 22])
    q, k, v = qkv
    part = sparse_attention(
        q[:, index_T], k, v, chosen[:, index_T], docs.take(index_T), docs, 0.7, softcap
    )
    close(part, want[0][:, index_T])


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
def test_all_keys_chosen_is_causal_attention(softcap: float | None) -> None:
    docs, qkv = packed(), operands((4, 2, 6, 6))
    got = sparse_attention(*qkv, choice(docs, 23), docs, docs, 0.7, softcap)
    close(got, causal_attention(*qkv, docs, 0.7, softcap))


def test_gradients_are_those_of_finite_differences() -> None:
    docs = Documents.rows(1, 9)
    chosen = choice(docs)
    assert torch.autograd.gradcheck(
        lambda q, k, v: sparse_attention(q, k, v, chosen, docs, docs, 0.7, 1.5),
        operands((2, 1, 4, 3), rows=1, tokens=9),
    )


def test_keys_that_were_not_chosen_play_no_part() -> None:
    """Not even the first, where unused slots point before it; other documents neither."""
    docs = packed(((5, 9, 9),))
    chosen = choice(docs, 3)
    q, k, v = (x.detach() for x in operands((2, 2, 4, 4), rows=1))
    unseen = ~chosen_mask(chosen, 23)[0]
    runs = []
    for change in (0.0, 1e6):
        qkv = [x.clone() for x in (q, k, v)]
        for x in qkv[1:]:
            x[:, 0] += change
        qkv = [x.requires_grad_() for x in qkv]
        o = sparse_attention(*qkv, chosen, docs, docs, 0.7)
        runs.append((o, *torch.autograd.grad(o, qkv, torch.ones_like(o))))
    blind = unseen[:, 0]
    assert 0 < blind.sum() < 23
    for before, after in zip(*runs, strict=True):
        if before.shape == q.shape:  # outputs and gradients of queries; keys of other documents
            assert torch.equal(before[:, 5:], after[:, 5:])
    assert torch.equal(runs[0][0][:, blind], runs[1][0][:, blind])


def test_a_block_is_the_largest_that_lives() -> None:
    docs, tokens = Documents.rows(1, 256), 256
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in operands((4, 2, 6, 6), 1, tokens))
    chosen = choice(docs)
    block_bytes = 4 * 8 * tokens * 4
    with LiveBytes() as live:
        o = sparse_attention(q, k, v, chosen, docs, docs, 0.7)
        assert live.alive() == o.nbytes + 4 * tokens * 4  # and one number per query and head
        gradients = torch.autograd.grad(o, (q, k, v), o.detach())
    assert live.largest == block_bytes
    assert [g.dtype for g in (o, *gradients)] == [torch.bfloat16] * 4
    inputs = sum(x.numel() for x in (q, k, v))
    assert live.peak <= 4 * block_bytes + 8 * inputs * 4


def test_bf16_is_computed_in_fp32() -> None:
    docs = packed()
    chosen = choice(docs)
    qkv = [x.detach().bfloat16().requires_grad_() for x in operands((4, 2, 6, 6))]
    exact = [x.detach().double().requires_grad_() for x in qkv]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = sparse_attention(*qkv, chosen, docs, docs, 0.7)
    want = sparse_attention(*exact, chosen, docs, docs, 0.7)
    close(o.double(), want, 2**-8)
    d_o = noise(2, 23, 4, 6, seed=9)
    pairs = zip(
        torch.autograd.grad(o, qkv, d_o.bfloat16()),
        torch.autograd.grad(want, exact, d_o.bfloat16().double()),
        strict=True,
    )
    for got, true in pairs:
        close(got.double(), true, 1e-2)  # sum p dp is made from the rounded output
