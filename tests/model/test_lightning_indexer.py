"""The lightning indexer's kernels: the formula, ties, parts of rows, documents, live bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.kernels.attention.causal import document_mask
from megacpp.kernels.sparse_attention import indexer as kernel
from megacpp.kernels.sparse_attention.indexer import choose_keys, index_scores
from megacpp.kernels.sparse_attention.indexer_loss import HeadShard, Target, indexer_loss
from megacpp.kernels.sparse_attention.reference import chosen_mask, sparse_attention
from megacpp.model.documents import Documents
from tests.model.attention_cases import close, noise, packed


def indexer(
    tokens: int = 23, heads: int = 3, rows: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weights as leaves."""
    shapes = ((rows, tokens, heads, 8), (rows, tokens, 8), (rows, tokens, heads))
    q, k, w = (noise(*s, seed=i, dtype=dtype).requires_grad_() for i, s in enumerate(shapes))
    return q, k, w


def naive_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bti,btis->bts", w, torch.einsum("btih,bsh->btis", q, k).relu())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles of queries and of keys in 23 tokens, the last of both ragged."""
    monkeypatch.setattr(kernel, "QUERIES", 8)
    monkeypatch.setattr(kernel, "KEYS", 10)


def test_scores_are_the_formula() -> None:
    leaves, d_BTS = indexer(), noise(2, 23, 23, seed=9)
    results = []
    for form in (naive_scores, index_scores):
        scores_BTS = form(*leaves)
        results.append((scores_BTS, *torch.autograd.grad(scores_BTS, leaves, d_BTS)))
    for want, got in zip(*results, strict=True):
        close(got, want)
    assert torch.autograd.gradcheck(index_scores, tuple(x[:, :4] for x in leaves))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 9])
def test_heads_that_go_together_change_nothing(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads on a budget for so many of 23 x 23 numbers in two rows; the last may be fewer."""
    leaves, d_BTS = indexer(), noise(2, 23, 23, seed=9)
    assert kernel.heads_at_once(4, 2 * 23 * 23, 8, "cpu") == 1
    monkeypatch.setitem(kernel.AT_ONCE, "cpu", heads * 2 * 23 * 23 * 8)
    assert kernel.heads_at_once(4, 2 * 23 * 23, 8, "cpu") == min(heads, 4)
    results = []
    for form in (naive_scores, index_scores):
        scores_BTS = form(*leaves)
        results.append((scores_BTS, *torch.autograd.grad(scores_BTS, leaves, d_BTS)))
    for want, got in zip(*results, strict=True):
        close(got, want)
    docs = packed()
    mask_BTS = document_mask(docs, docs)[:, 0].expand(2, 23, 23)
    q, k, w = leaves
    assert torch.equal(choose_keys(q, k, w, docs, docs, 4), naive_choice(q, k, w, mask_BTS, 4))


def test_bytes_of_heads_that_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the scores, the products of as many heads as the budget allows."""
    q, k, w = (x.detach() for x in indexer(tokens=64, heads=16, dtype=torch.float32))
    pairs_bytes = 2 * 64 * 64 * 4
    monkeypatch.setitem(kernel.AT_ONCE, "cpu", 4 * pairs_bytes + 1)
    with LiveBytes() as live:
        kernel.tile_scores(q, k, w)
    assert live.largest == 4 * pairs_bytes
    assert 5 * pairs_bytes <= live.peak <= 5 * pairs_bytes + 4 * (w.numel() + q.numel())


def test_scores_in_fp32_drift_no_further_than_rounding() -> None:
    leaves = indexer(tokens=256, heads=8, rows=1, dtype=torch.float32)
    want, got = naive_scores(*leaves), index_scores(*leaves)
    drift = ((got - want).norm() / want.norm()).item()
    assert drift <= 2e-7, f"{drift:.2e}"  # two units in the last place of fp32


def test_scores_hold_two_tensors_of_their_size_and_none_per_head() -> None:
    q, k, w = (x.bfloat16().detach().requires_grad_() for x in indexer(tokens=64, heads=16))
    pairs_bytes = 2 * 64 * 64 * 4
    d_BTS = torch.ones(2, 64, 64)
    with LiveBytes() as live:
        scores_BTS = index_scores(q, k, w)
        assert (live.largest, scores_BTS.dtype) == (pairs_bytes, torch.float32)
        assert live.peak <= 2 * pairs_bytes + 4 * (k.numel() + w.numel() + 2 * q[:, :, 0].numel())
    del live
    with LiveBytes() as live:
        gradients = torch.autograd.grad(scores_BTS, (q, k, w), d_BTS)
    assert live.largest == pairs_bytes
    of_operands = sum(x.nbytes for x in gradients) + 4 * (8 * k.numel() + w.numel())
    assert live.peak <= pairs_bytes + of_operands
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 3


def naive_choice(q: Tensor, k: Tensor, w: Tensor, mask_BTS: Tensor, top_k: int) -> Tensor:
    """One query at a time; of equal scores the later key."""
    scores_BTS = naive_scores(q, k, w).detach()
    chosen = torch.full((*w.shape[:2], top_k), -1, dtype=torch.int32)
    for b, t in ((b, t) for b in range(w.shape[0]) for t in range(w.shape[1])):
        visible = mask_BTS[b, t].nonzero()[:, 0].tolist()
        row = scores_BTS[b, t].tolist()
        best = sorted(visible, key=lambda s: (row[s], s), reverse=True)[:top_k]
        chosen[b, t, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    return chosen


@pytest.mark.parametrize("docs", [packed(), Documents.rows(2, 23)], ids=["packed", "whole"])
@pytest.mark.parametrize("top_k", [1, 4, 13, 23])
def test_the_best_visible_keys_are_chosen(docs: Documents, top_k: int) -> None:
    q, k, w = indexer()
    mask_BTS = document_mask(docs, docs)[:, 0].expand(2, 23, 23)
    want = naive_choice(q, k, w, mask_BTS, top_k)
    assert torch.equal(choose_keys(q, k, w, docs, docs, top_k), want)
    # Some tokens of the row: what a rank of context parallelism has.
    index_T = torch.tensor([0, 1, 2, 9, 11, 17, 18, 19, 20, 22])
    part = docs.take(index_T)
    got = choose_keys(q[:, index_T], k, w[:, index_T], part, docs, top_k)
    assert torch.equal(got, want[:, index_T])


def test_of_equal_scores_the_later_key_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = packed()
    q, k, w = (x.detach().mul(0.7).round() for x in indexer(heads=2))  # whole numbers: many ties
    scores_BTS, mask_BTS = naive_scores(q, k, w), document_mask(docs, docs)[:, 0]
    assert (scores_BTS == 0)[mask_BTS].double().mean() > 0.3
    want = naive_choice(q, k, w, mask_BTS, 5)
    for tile in (8, 3, 23):
        monkeypatch.setattr(kernel, "KEYS", tile)
        assert torch.equal(choose_keys(q, k, w, docs, docs, 5), want)


def test_more_slots_than_keys_are_cut_off() -> None:
    q, k, w = indexer()
    docs = Documents.rows(2, 23)
    chosen_BTC = choose_keys(q, k, w, docs, docs, 99)
    assert torch.equal(chosen_mask(chosen_BTC, 23)[0], document_mask(docs, docs)[0, 0])


def test_unused_slots_choose_no_key() -> None:
    chosen = torch.tensor([[[-1, -1, -1], [2, -1, -1], [0, 1, 3]]], dtype=torch.int32)
    assert chosen_mask(chosen, 4).int().tolist() == [[[0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]]]


def attended(heads: int, key_heads: int, **settings: object) -> Target:
    """Main attention to resemble, over two rows of 23 tokens."""
    docs = settings.pop("docs", None) or packed()
    q, k = noise(2, 23, heads, 6, seed=4), noise(2, 23, key_heads, 6, seed=5)
    return Target(q, k, 0.9, queries=docs, keys=docs, **{"softcap": None, **settings})  # type: ignore[arg-type]


def naive_loss(q: Tensor, k: Tensor, w: Tensor, target: Target) -> Tensor:
    """Whole tensors and autograd; log p only where p is not 0."""
    allowed = document_mask(target.queries, target.keys)
    if target.chosen_BTC is not None:
        allowed = chosen_mask(target.chosen_BTC, k.shape[1])[:, None]
    group = target.q_BTNH.shape[2] // target.k_BSKH.shape[2]
    k_BSNH = target.k_BSKH.repeat_interleave(group, dim=2)
    logits = torch.einsum("btnh,bsnh->bnts", target.q_BTNH, k_BSNH) * target.scale
    if target.softcap is not None:
        logits = target.softcap * torch.tanh(logits / target.softcap)
    p = logits.masked_fill(~allowed, float("-inf")).softmax(-1).mean(1)
    allowed = allowed[:, 0].expand(p.shape)
    log_i = naive_scores(q, k, w).masked_fill(~allowed, float("-inf")).log_softmax(-1)
    return (p[allowed] * (p[allowed].log() - log_i[allowed])).sum()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("docs", [packed(), Documents.rows(2, 23)], ids=["packed", "whole"])
def test_the_loss_is_the_divergence(
    heads: tuple[int, int], softcap: float | None, sparse: bool, docs: Documents
) -> None:
    leaves = indexer()
    chosen = choose_keys(*leaves, docs, docs, 5) if sparse else None
    target = attended(*heads, docs=docs, softcap=softcap, chosen_BTC=chosen)
    results = []
    for form in (naive_loss, indexer_loss):
        loss = form(*leaves, target)
        results.append((loss, *torch.autograd.grad(0.3 * loss, leaves)))
    for want, got in zip(*results, strict=True):
        close(got, want)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_losses_of_parts_of_the_row_add_up(sparse: bool) -> None:
    docs, leaves = packed(), indexer()
    chosen = choose_keys(*leaves, docs, docs, 5) if sparse else None
    whole = attended(4, 2, docs=docs, chosen_BTC=chosen)
    want = indexer_loss(*leaves, whole)
    want = (want, *torch.autograd.grad(want, leaves))
    got = torch.zeros((), dtype=torch.float64)
    for index_T in torch.arange(23)[torch.randperm(23)].split(12):
        index_T = index_T.sort().values
        q, k, w = leaves[0][:, index_T], leaves[1], leaves[2][:, index_T]
        mine = None if chosen is None else chosen[:, index_T]
        part = Target(
            whole.q_BTNH[:, index_T], whole.k_BSKH, 0.9, None, docs.take(index_T), docs, mine
        )
        got = got + indexer_loss(q, k, w, part)
    for a, b in zip((got, *torch.autograd.grad(got, leaves)), want, strict=True):
        close(a, b)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_heads_of_several_processes_make_one_target(sparse: bool) -> None:
    docs, leaves = packed(), indexer()
    chosen = choose_keys(*leaves, docs, docs, 5) if sparse else None
    whole = attended(4, 4, docs=docs, chosen_BTC=chosen)
    want = indexer_loss(*leaves, whole)
    want = (want, *torch.autograd.grad(want, leaves))

    def of_heads(first: int, add: object) -> Target:
        shard = HeadShard(4, add)  # type: ignore[arg-type]
        q, k = (x[:, :, first : first + 2] for x in (whole.q_BTNH, whole.k_BSKH))
        return Target(q, k, 0.9, None, docs, docs, chosen, shard)

    blocks: list[Tensor] = []  # what the other process adds, a block of queries at a time
    indexer_loss(*leaves, of_heads(2, lambda p: (blocks.append(p.clone()), p)[1]))
    assert len(blocks) == 3
    others = iter(blocks)
    got = indexer_loss(*leaves, of_heads(0, lambda p: p + next(others)))
    for a, b in zip((got, *torch.autograd.grad(got, leaves)), want, strict=True):
        close(a, b)


def test_documents_are_isolated() -> None:
    docs, runs = packed(((5, 9, 9),)), []
    other = torch.ones(23, dtype=torch.bool)
    other[5:14] = False
    for change in (0.0, 3.0):
        tensors = [x.detach() for x in indexer(rows=1, dtype=torch.float32)]
        for x in tensors:
            x[:, 7] += change
            x.requires_grad_()
        chosen = choose_keys(*tensors, docs, docs, 3)
        target = attended(2, 2, docs=docs, chosen_BTC=chosen)
        target = Target(target.q_BTNH[:1], target.k_BSKH[:1], 0.9, None, docs, docs, chosen)
        runs.append((chosen, *torch.autograd.grad(indexer_loss(*tensors, target), tensors)))
    for before, after in zip(*runs, strict=True):
        assert torch.equal(before[:, other], after[:, other])
        assert not torch.equal(before[:, ~other], after[:, ~other])


def test_choice_and_loss_hold_tiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, heads = 512, 4
    monkeypatch.setattr(kernel, "QUERIES", 16)
    monkeypatch.setattr(kernel, "KEYS", 32)
    leaves = indexer(tokens, heads, rows=1, dtype=torch.float32)
    docs = Documents.rows(1, tokens)
    with LiveBytes() as live:
        chosen = choose_keys(*leaves, docs, docs, 8)
    tile_bytes = 16 * (8 + 32) * 4
    assert live.largest == chosen.nbytes == tokens * 8 * 4
    assert live.peak <= chosen.nbytes + 12 * tile_bytes
    q, k = (noise(1, tokens, 4, 8, seed=s, dtype=torch.float32) for s in (4, 5))
    for compared in (None, chosen):
        with LiveBytes() as live:
            loss = indexer_loss(*leaves, Target(q, k, 0.4, None, docs, docs, compared))
        gradients = sum(x.nbytes for x in leaves)
        assert live.alive() <= gradients + 4 + loss.nbytes
        assert live.largest <= max(16 * tokens * 4, leaves[0].nbytes)
        assert live.peak <= gradients + tokens * 4 + 7 * 16 * tokens * 4


@pytest.mark.parametrize("compared", ["visible", "chosen"])
def test_bf16_inputs_are_computed_in_fp32(compared: str) -> None:
    docs = packed()
    leaves = [x.detach().bfloat16().requires_grad_() for x in indexer()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    chosen = choose_keys(*leaves, docs, docs, 5)
    assert torch.equal(chosen, choose_keys(*exact, docs, docs, 5))
    target = attended(4, 2, docs=docs, chosen_BTC=chosen if compared == "chosen" else None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = indexer_loss(*leaves, target)
    want = indexer_loss(*exact, target)
    close(loss.double(), want, 1e-6)
    for leaf, got, true in zip(
        leaves, torch.autograd.grad(loss, leaves), torch.autograd.grad(want, exact), strict=True
    ):
        assert got.dtype == leaf.dtype == torch.bfloat16
        close(got.double(), true, 2**-8)


def test_nothing_looks_at_values_or_has_a_size_that_depends_on_them() -> None:
    """Tensors without values run through forward and backward."""
    with FakeTensorMode():
        docs = Documents.rows(1, 40)
        part = docs.take(torch.arange(20))
        q, k, w = (torch.rand(1, 40, *s, requires_grad=True) for s in ((2, 8), (8,), (2,)))
        main = torch.rand(1, 40, 2, 4, requires_grad=True)
        for queries, rows in ((docs, slice(40)), (part, slice(20))):
            chosen = choose_keys(q[:, rows], k, w[:, rows], queries, docs, 4)
            o = sparse_attention(main[:, rows], main, main, chosen, queries, docs, 0.5)
            for compared in (None, chosen):
                target = Target(main[:, rows], main, 0.5, None, queries, docs, compared)
                (indexer_loss(q[:, rows], k, w[:, rows], target) + o.sum()).backward(
                    retain_graph=True
                )
        assert q.grad is not None and main.grad is not None
