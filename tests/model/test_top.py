"""Token order prediction against its definition, and the proof that no `[N, V]` target exists.

Legend: B rows, T tokens, N tokens of all rows, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.blocks.top.config import TOPConfig
from megacpp.config.schema import Config, ModelConfig, PrecisionConfig
from megacpp.kernels.linear_cross_entropy.chunked import (
    ShardStatistics,
    VocabularyShard,
    merge_statistics,
)
from megacpp.kernels.token_order import TokensAhead, token_order_loss, token_order_loss_plain
from megacpp.model.documents import Documents
from megacpp.model.hybrid import HybridLM
from parallel.build import build_model
from parallel.mesh import World
from tests.model.small import small
from tests.synthetic import ragged_batch

B, T, D, V = 3, 17, 6, 11
N = B * T


def rows(vocab: int = V, seed: int = 3) -> tuple[Tensor, Documents]:
    g = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(vocab, (B, T), generator=g)
    return ids_BT, Documents.from_ids((torch.rand(B, T, generator=g) < 0.15).cumsum(1))


def ahead_of(window: int, index_T: Tensor | None = None, vocab: int = V) -> TokensAhead:
    ids_BT, docs = rows(vocab)
    return TokensAhead.from_rows(ids_BT, docs.ends_BT, window, index_T)


def by_definition(window: int, vocab: int = V) -> Tensor:
    """Scores `[N, V]`: minus the tokens to the next time a word comes, or -inf."""
    (ids_BT, docs), scores_BTV = rows(vocab), torch.full((B, T, vocab), -math.inf)
    for b in range(B):
        for t in range(T):
            for later in reversed(range(t + 1, min(T, t + window + 1))):
                if docs.ids_BT[b, later] == docs.ids_BT[b, t]:
                    scores_BTV[b, t, ids_BT[b, later]] = t - later
    return scores_BTV.flatten(0, 1).double()


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    shapes = (N, D), (V, D)
    return tuple(torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes)  # type: ignore[return-value]


def close(got: Tensor, want: Tensor, relative: float = 1e-12) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got - want).abs().max() <= relative * want.abs().max()


@pytest.mark.parametrize("chunk", [None, 1, 8, N - 1, N])
@pytest.mark.parametrize("window", [1, 2, 5, T - 1, 100])
def test_loss_and_gradients_are_those_of_whole_scores(window: int, chunk: int | None) -> None:
    x_ND, weight_VD = problem()
    got = token_order_loss(x_ND, weight_VD, ahead_of(window), chunk)
    want = token_order_loss_plain(x_ND, weight_VD, by_definition(window))
    close(got, want)
    leaves = x_ND, weight_VD
    found = torch.autograd.grad(0.3 * got, leaves), torch.autograd.grad(0.3 * want, leaves)
    for gradient, reference in zip(*found, strict=True):
        close(gradient, reference)


def test_a_word_far_ahead_counts_as_long_as_its_weight_is_a_number() -> None:
    """One document of 1000 words, all different: e^-k for the word k after the next one."""
    ends_BT = torch.zeros(1, 1000, dtype=torch.bool)
    ends_BT[:, -1] = True
    for dtype, most in ((torch.float32, 88), (torch.float64, 709)):
        ahead = TokensAhead.from_rows(torch.arange(1000)[None], ends_BT, 2000)
        words_nK, share_nK = ahead.targets(slice(0, 1), dtype)
        assert words_nK.tolist() == [list(range(1, most + 1))]
        close(share_nK[0], torch.arange(0, -most, -1, dtype=dtype).softmax(0), 1e-6)
        assert share_nK.min() > 0 and math.exp(-most) < torch.finfo(dtype).tiny


def test_a_token_with_nothing_ahead_adds_exactly_nothing() -> None:
    x_ND, weight_VD = problem()
    (dx_ND,) = torch.autograd.grad(token_order_loss(x_ND, weight_VD, ahead_of(5)), x_ND)
    ends_N = rows()[1].ends_BT.flatten()
    assert not dx_ND[ends_N].count_nonzero() and dx_ND[~ends_N].abs().amax(1).min() > 0
    alone = Documents.from_ids(torch.arange(N)[None])
    nothing = TokensAhead.from_rows(torch.zeros(1, N, dtype=torch.int64), alone.ends_BT, 5)
    loss = token_order_loss(x_ND, weight_VD, nothing)
    assert loss.item() == 0
    assert not any(g.count_nonzero() for g in torch.autograd.grad(loss, (x_ND, weight_VD)))


def test_some_tokens_of_every_row_in_any_order() -> None:
    x_ND, weight_VD = problem()
    index_T = torch.tensor([12, 13, 14, 0, 1, 2])
    places_N = (torch.arange(B)[:, None] * T + index_T).flatten()
    got = token_order_loss(x_ND[places_N], weight_VD, ahead_of(5, index_T))
    scores_NV = by_definition(5)[places_N]
    close(got, token_order_loss_plain(x_ND[places_N], weight_VD, scores_NV))


def test_shards_of_the_vocabulary_make_the_whole() -> None:
    """Two processes in turn; the first pass finds what the other will tell."""
    x_ND, weight_VD = problem()
    cut, told = (4, V - 4), ([], [])
    want = token_order_loss(x_ND, weight_VD, ahead_of(5), chunk=9)
    dx_ND, dw_VD = torch.autograd.grad(want, (x_ND, weight_VD))

    def run(rank: int, merge: object) -> list[Tensor]:
        x, part = x_ND.detach().requires_grad_(), weight_VD.detach().split(cut)[rank]
        shard = VocabularyShard(rank * cut[0], merge)  # type: ignore[arg-type]
        loss = token_order_loss(x, part.requires_grad_(), ahead_of(5), 9, shard)
        return [loss.detach(), *torch.autograd.grad(loss, (x, part))]

    for rank in (0, 1):

        def note(
            own: ShardStatistics, found: list[ShardStatistics] = told[rank]
        ) -> ShardStatistics:
            found.append(own)
            return own

        run(rank, note)
    parts = []
    for rank in (0, 1):
        others = iter(told[1 - rank])
        parts.append(run(rank, lambda own, others=others: merge_statistics([own, next(others)])))
    for loss, *_ in parts:
        close(loss, want.detach())
    close(parts[0][1] + parts[1][1], dx_ND)
    close(torch.cat([parts[0][2], parts[1][2]]), dw_VD)


def test_bf16_keeps_the_softmax_in_fp32() -> None:
    x_ND, weight_VD = problem(torch.bfloat16)
    loss = token_order_loss(x_ND, weight_VD, ahead_of(5), 8)
    wide = [t.detach().float() for t in (x_ND, weight_VD)]
    logits_NV = (x_ND @ weight_VD.T).detach().float()  # rounded once, as every product is
    scores_NV = by_definition(5).float()
    want = token_order_loss_plain(logits_NV, torch.eye(V), scores_NV)
    assert loss.dtype == torch.float32
    close(loss.detach(), want, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(token_order_loss(wide[0], wide[1], ahead_of(5), 8), loss)


def test_nothing_waits_for_the_device() -> None:
    """Fake tensors have no values: whoever asked for one would fail."""
    ids_BT, docs = rows()
    x_ND, weight_VD = (t.detach() for t in problem())
    with FakeTensorMode(allow_non_fake_inputs=True):
        ahead = TokensAhead.from_rows(ids_BT * 1, docs.ends_BT & True, 5)
        x_ND, weight_VD = ((t * 1).requires_grad_() for t in (x_ND, weight_VD))
        token_order_loss(x_ND, weight_VD, ahead).backward()
        with pytest.raises(DataDependentOutputException):
            ahead.last_N[0].item()
    assert x_ND.grad is not None and x_ND.grad.shape == (N, D)


def test_memory_no_target_of_all_tokens() -> None:
    """512 tokens, vocabulary 4096, D 32, fp32: a chunk of logits, two gradients, short lists.

    Whole scores alone are 8 MiB; their softmax, the logits' and their gradients as much each.
    """
    tokens, dim, vocab, window = 512, 32, 4096, 64
    g = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(vocab, (1, tokens), generator=g)
    x_ND = torch.randn(tokens, dim, generator=g).requires_grad_()
    weight_VD = torch.randn(vocab, dim, generator=g).requires_grad_()
    ends_BT = Documents.rows(1, tokens).ends_BT
    with LiveBytes() as live:
        ahead = TokensAhead.from_rows(ids_BT, ends_BT, window)
        token_order_loss(x_ND, weight_VD, ahead).backward()
        del ahead
    chunk_bytes, gradient_bytes = 4 * 128 * vocab, 4 * (tokens * dim + vocab * dim)
    lists = 128 * window * (8 + 4)  # words and their probabilities
    assert live.now == gradient_bytes and live.largest == chunk_bytes
    assert live.peak < 1.02 * (chunk_bytes + gradient_bytes + lists + 128 * window * 4)
    assert live.peak < 4 * tokens * vocab / 2.9


# ---- in the model ------------------------------------------------------------------------------


def with_top(loss: float = 0.3, window: int = 5) -> ModelConfig:
    model = small("AMF", init_std=0.3, logit_softcap=5.0)
    return dataclasses.replace(model, top=TOPConfig(loss, window))


def build(config: ModelConfig) -> HybridLM:
    world = World(0, 1, torch.device("cpu"))
    return build_model(Config(model=config, precision=PrecisionConfig("fp64")), world)


def test_its_gradient_is_added_to_the_heads() -> None:
    """Of all parameters, against autograd through whole logits; the mean is over all tokens."""
    model, batch = build(with_top()), ragged_batch([0, 1], T)
    model.top.aux_scale.fill_(1 / batch.ids_BT.numel())
    out = model(batch.ids_BT, batch.labels_BT, batch.docs)
    (out.loss_sum / 7).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.eval()
    x_BTD = model.hidden(batch.ids_BT, batch.docs)
    main = model.head(x_BTD, batch.labels_BT).loss_sum / 7
    scores_NV = of_batch(batch.ids_BT, batch.docs, 5)
    order = token_order_loss_plain(x_BTD.flatten(0, 1), model.top.unembed.weight, scores_NV)
    (main + 0.3 * order / batch.ids_BT.numel()).backward()
    for name, p in model.named_parameters():
        got = found[name]
        assert got is not None and p.grad is not None, name
        close(got, p.grad)
    close(model.top.loss_sums.sum(), 0.3 * order.detach())


def of_batch(ids_BT: Tensor, docs: Documents, window: int, vocab: int = 50) -> Tensor:
    ahead = TokensAhead.from_rows(ids_BT, docs.ends_BT, window)
    words_NK, share_NK = ahead.targets(slice(None), torch.float64)
    empty_NV = torch.zeros(ids_BT.numel(), vocab, dtype=torch.float64)
    return empty_NV.scatter_reduce(1, words_NK, share_NK, "amax").log()


def test_a_token_changes_nothing_in_other_documents() -> None:
    """Loss of document 0, its tokens' gradients: the same whatever stands in document 1."""
    model = build(with_top())
    ids_BT = torch.randint(50, (1, T), generator=torch.Generator().manual_seed(0))
    docs = Documents.from_ids((torch.arange(T)[None] >= 8).long())
    other_BT = torch.where(docs.ids_BT == 1, (ids_BT + 1) % 50, ids_BT)
    x_BTD = model.hidden(ids_BT, docs).detach().requires_grad_()
    grads = []
    for tokens_BT in (ids_BT, other_BT):
        loss = model.top.loss_sum(x_BTD, docs.with_tokens(tokens_BT, tokens_BT))
        grads.append(torch.autograd.grad(loss, x_BTD)[0])
    assert torch.equal(grads[0][:, :8], grads[1][:, :8])
    assert not torch.equal(grads[0][:, 8:], grads[1][:, 8:])


def test_only_training_makes_it() -> None:
    model, batch = build(with_top()), ragged_batch([0], T)
    plain = build(dataclasses.replace(with_top(), top=TOPConfig()))
    want = plain(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum
    assert torch.equal(model(batch.ids_BT, batch.labels_BT, batch.docs).loss_sum, want)
    assert model.top.loss_sums.sum() > 0
    model.top.forget()
    model.eval()(batch.ids_BT, batch.labels_BT, batch.docs)
    with torch.no_grad():
        model.train()(batch.ids_BT, batch.labels_BT, batch.docs)
    assert model.top.loss_sums.sum() == 0


def test_the_target_alone_leads_the_softmax_there() -> None:
    """Gradient descent on the logits of one token: softmax becomes e^-a over the words ahead."""
    ids_BT, ends_BT = torch.tensor([[9, 4, 7, 4, 2]]), torch.tensor([[False] * 4 + [True]])
    ahead = TokensAhead.from_rows(ids_BT, ends_BT, 10)
    logits_NV = torch.zeros(5, V, dtype=torch.float64, requires_grad=True)
    for _ in range(3000):
        loss = token_order_loss(logits_NV, torch.eye(V, dtype=torch.float64), ahead)
        (grad_NV,) = torch.autograd.grad(loss, logits_NV)
        with torch.no_grad():
            logits_NV -= 2 * grad_NV
    weights = {4: 1.0, 7: math.exp(-1), 2: math.exp(-3)}
    total = sum(weights.values())
    for word, weight in weights.items():
        assert abs(logits_NV[0].softmax(0)[word].item() - weight / total) < 1e-3
