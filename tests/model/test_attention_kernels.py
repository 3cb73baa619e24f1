"""Attention kernels against the definition, one query at a time: fp64, 1e-12; exact isolation."""

from __future__ import annotations

import pytest
import torch

from megacpp.kernels.attention import causal as kernel
from megacpp.kernels.attention import softcap as softcap_kernel
from megacpp.kernels.attention.reference import attention_reference
from megacpp.model.documents import Documents
from tests.model.attention_cases import close, noise, packed


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("docs", [packed(), Documents.rows(2, 23)], ids=["packed", "whole"])
@pytest.mark.parametrize(
    "heads",
    [(4, 4, 6, 6), (4, 2, 6, 6), (4, 1, 8, 5), (2, 2, 4, 7)],
    ids=lambda h: "-".join(map(str, h)),
)
def test_fast_attention_is_the_definition(
    heads: tuple[int, int, int, int],
    docs: Documents,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(softcap_kernel, "BLOCK", 8)  # three blocks, the last one ragged
    num_q, num_kv, dim, value_dim = heads
    shapes = ((num_q, dim), (num_kv, dim), (num_kv, value_dim))
    qkv = [noise(2, 23, *s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    d_o = noise(2, 23, num_q, value_dim, seed=9)
    results = []
    for form in (attention_reference, kernel.causal_attention):
        o = form(*qkv, docs, 0.7, softcap)
        results.append((o, *torch.autograd.grad(o, qkv, d_o)))
    for want, got in zip(*results, strict=True):
        close(got, want)


@pytest.mark.parametrize("docs", [packed(), Documents.rows(2, 23)], ids=["packed", "whole"])
@pytest.mark.parametrize("dims", [(6, 6), (8, 5), (4, 7)], ids=str)
def test_heads_whose_numbers_are_no_neighbours_in_memory(
    dims: tuple[int, int], docs: Documents
) -> None:
    dim, value_dim = dims
    shapes = ((4, dim), (2, dim), (2, value_dim))
    qkv = [noise(2, 23, *s[::-1], seed=i).mT.requires_grad_() for i, s in enumerate(shapes)]
    d_o = noise(2, 23, value_dim, 4, seed=9).mT
    results = []
    for form in (attention_reference, kernel.causal_attention):
        o = form(*qkv, docs, 0.7)
        results.append((o, *torch.autograd.grad(o, qkv, d_o)))
    for want, got in zip(*results, strict=True):
        close(got, want)


@pytest.mark.parametrize("dims", [(6, 6), (8, 5), (4, 7)], ids=str)
def test_a_bool_mask_is_an_additive_one(dims: tuple[int, int]) -> None:
    shapes = ((4, dims[0]), (2, dims[0]), (2, dims[1]))
    q, k, v = (noise(2, 23, *s, seed=i) for i, s in enumerate(shapes))
    seen = kernel.document_mask(packed(), packed())
    unseen = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    close(kernel.attend(q, k, v, 0.7, None, seen), kernel.attend(q, k, v, 0.7, None, unseen))


@pytest.mark.parametrize("window", [0, 1, 200])
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
def test_fast_attention_is_the_definition_beyond_one_kernel_block(
    softcap: float | None, window: int
) -> None:
    docs = packed(((130, 1, 420, 49),)).within(window)  # SDPA on CPU takes 512 keys at a time
    q, k, v = noise(1, 600, 2, 4), noise(1, 600, 1, 4, seed=1), noise(1, 600, 1, 4, seed=2)
    want = attention_reference(q, k, v, docs, 0.5, softcap)
    close(kernel.causal_attention(q, k, v, docs, 0.5, softcap), want)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
def test_documents_are_isolated_beyond_one_kernel_block(softcap: float | None) -> None:
    docs, d_o = packed(((130, 1, 420, 49),)), noise(1, 600, 2, 4, dtype=torch.float32)
    other = torch.ones(600, dtype=torch.bool)
    other[131:551] = False
    runs = []
    for change in (0.0, 5.0):
        qkv = [noise(1, 600, n, 4, seed=n, dtype=torch.float32) for n in (4, 2, 2)]
        for t in qkv:
            t[:, 300] += change
            t.requires_grad_()
        o = kernel.causal_attention(*qkv, docs, 0.5, softcap)
        runs.append((o, *torch.autograd.grad(o, qkv, d_o.repeat(1, 1, 2, 1))))
    for before, after in zip(*runs, strict=True):
        assert torch.equal(before[:, other], after[:, other])
        assert not torch.equal(before[:, ~other], after[:, ~other])


def test_a_large_cap_is_no_cap() -> None:
    q, k, v, docs = (
        noise(2, 23, 2, 4),
        noise(2, 23, 2, 4, seed=1),
        noise(2, 23, 2, 4, seed=2),
        packed(),
    )
    capped = kernel.causal_attention(q, k, v, docs, 0.5, softcap=1e7)
    close(
        capped, kernel.causal_attention(q, k, v, docs, 0.5)
    )  # cap tanh(z / cap) - z ~ z^3 / cap^2


def test_queries_of_another_part_of_the_row_see_the_right_keys() -> None:
    """What context parallelism needs: some tokens' queries, all tokens' keys."""
    docs, q, kv = packed(), noise(2, 23, 2, 4), noise(2, 23, 2, 4, seed=1)
    part = torch.tensor([0, 1, 2, 17, 18, 22])
    mine = Documents(docs.ids_BT[:, part], docs.positions_BT[:, part])
    for softcap in (None, 1.5):
        want = kernel.causal_attention(q, kv, kv, docs, 0.5, softcap)[:, part]
        mask = kernel.document_mask(mine, docs)
        close(kernel.attend(q[:, part], kv, kv, 0.5, softcap, mask), want)
