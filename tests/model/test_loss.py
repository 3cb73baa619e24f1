"""Fused linear cross entropy against whole logits, and the proof that those never exist."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.config.schema import ModelConfig
from megacpp.kernels.linear_cross_entropy.chunked import (
    CrossEntropy,
    chunk_rows,
    linear_cross_entropy,
    merge_statistics,
)
from megacpp.kernels.linear_cross_entropy.reference import (
    linear_cross_entropy_plain,
    vocab_shard_statistics,
)
from megacpp.model.head import LanguageModelHead, LossSum
from megacpp.model.init import initialise

N, D, V = 37, 12, 50
CASES = list(itertools.product((None, 2.5), (0.0, 1e-2)))


def problem(dtype: torch.dtype = torch.float64, masked: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    x_ND = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    target_N = torch.randint(V, (N,), generator=g)
    target_N[:: max(1, N // masked) if masked else N + 1] = -100
    return x_ND, weight_VD, target_N if masked else target_N.abs()


def gradients(out: CrossEntropy, *leaves: Tensor, scale: float = 0.37) -> list[Tensor]:
    return list(torch.autograd.grad(out.loss_sum * scale, leaves))


def close(got: Tensor, want: Tensor, relative: float = 1e-12) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= relative * scale, f"{error:.2e} > {relative:.0e} * {scale:.2e}"


@pytest.mark.parametrize("chunk", [None, 1, 8, 10, 36, 37, 64])
@pytest.mark.parametrize("softcap, z_loss", CASES)
def test_equals_the_plain_loss(softcap: float | None, z_loss: float, chunk: int | None) -> None:
    x_ND, weight_VD, target_N = problem()
    got = linear_cross_entropy(x_ND, weight_VD, target_N, softcap, z_loss, chunk)
    want = linear_cross_entropy_plain(x_ND, weight_VD, target_N, softcap, z_loss)
    close(got.loss_sum, want.loss_sum)
    close(got.nll_sum, want.nll_sum)
    close(got.lse_N, want.lse_N)
    assert got.valid_tokens == want.valid_tokens == (target_N >= 0).sum()
    assert (got.loss_sum > got.nll_sum) if z_loss else (got.loss_sum == got.nll_sum)
    pairs = zip(gradients(got, x_ND, weight_VD), gradients(want, x_ND, weight_VD), strict=True)
    for gradient, reference in pairs:
        close(gradient, reference)


@pytest.mark.parametrize("softcap, z_loss", CASES)
def test_no_valid_token_is_exactly_nothing(softcap: float | None, z_loss: float) -> None:
    x_ND, weight_VD, target_N = problem(torch.float32)
    out = linear_cross_entropy(x_ND, weight_VD, target_N.fill_(-100), softcap, z_loss, 8)
    assert out.loss_sum.item() == 0 and out.nll_sum.item() == 0 and out.valid_tokens.item() == 0
    assert not any(g.count_nonzero() for g in gradients(out, x_ND, weight_VD))


def test_no_token_at_all() -> None:
    _, weight_VD, _ = problem()
    empty_ND = torch.empty(0, D, dtype=torch.float64, requires_grad=True)
    out = linear_cross_entropy(empty_ND, weight_VD, torch.empty(0, dtype=torch.int64))
    assert out.loss_sum.item() == 0 and out.valid_tokens.item() == 0
    assert not any(g.count_nonzero() for g in gradients(out, empty_ND, weight_VD))


def test_an_ignored_token_gets_exactly_no_gradient() -> None:
    x_ND, weight_VD, target_N = problem()
    out = linear_cross_entropy(x_ND, weight_VD, target_N, 2.5, 1e-2, 8)
    (dx_ND,) = gradients(out, x_ND)
    ignored_N = target_N == -100
    assert ignored_N.any() and not dx_ND[ignored_N].count_nonzero()
    assert dx_ND[~ignored_N].abs().amax(1).min() > 0


@pytest.mark.parametrize("wanted", ["x", "weight", "neither"])
def test_gradients_only_where_they_are_wanted(wanted: str) -> None:
    x_ND, weight_VD, target_N = problem()
    x_ND.requires_grad_(wanted == "x")
    weight_VD.requires_grad_(wanted == "weight")
    out = linear_cross_entropy(x_ND, weight_VD, target_N)
    assert out.loss_sum.requires_grad == (wanted != "neither")
    assert not out.nll_sum.requires_grad and not out.lse_N.requires_grad
    if wanted != "neither":
        leaf = x_ND if wanted == "x" else weight_VD
        want = linear_cross_entropy_plain(x_ND, weight_VD, target_N)
        close(*gradients(out, leaf), *gradients(want, leaf))  # type: ignore[misc]


def test_a_factor_of_one_and_a_second_backward() -> None:
    x_ND, weight_VD, target_N = problem()
    out = linear_cross_entropy(x_ND, weight_VD, target_N)
    want = gradients(linear_cross_entropy_plain(x_ND, weight_VD, target_N), x_ND, scale=1.0)
    close(torch.autograd.grad(out.loss_sum, x_ND, retain_graph=True)[0], want[0])
    (out.loss_sum * 2.0).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss_sum.backward()


def test_bf16_accumulates_the_weight_gradient_in_fp32() -> None:
    """Chunked or whole, the weight gradient is rounded to bf16 once.

    Chunks of one token differ from one chunk only by the order of fp32 sums, so at most one last
    place of bf16 where a sum lies near a rounding border: 2^-8 relative to the entry.
    """
    x_ND, weight_VD, target_N = problem(torch.bfloat16)
    whole, single = (
        gradients(linear_cross_entropy(x_ND, weight_VD, target_N, chunk=c), weight_VD)[0]
        for c in (N, 1)
    )
    assert whole.dtype == torch.bfloat16
    difference = (whole - single).abs().float()
    assert (difference <= 2.0**-7 * whole.abs().float() + 1e-6).all()
    assert (difference > 0).float().mean() < 0.02


def test_autocast_computes_in_bf16_and_returns_fp32_gradients() -> None:
    x_ND, weight_VD, target_N = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(x_ND, weight_VD, target_N, 2.5, 1e-3, 8)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x_ND, weight_VD)]
    want = linear_cross_entropy(*narrow, target_N, 2.5, 1e-3, 8)  # type: ignore[arg-type]
    assert got.loss_sum.dtype == torch.float32 and torch.equal(got.loss_sum, want.loss_sum)
    dx_ND, dw_VD = gradients(got, x_ND, weight_VD)
    assert dx_ND.dtype == dw_VD.dtype == torch.float32
    narrow_dx, narrow_dw = gradients(want, *narrow)
    assert torch.equal(dx_ND, narrow_dx.float())
    assert not torch.equal(dw_VD, dw_VD.bfloat16().float()), "the weight gradient was rounded"
    close(dw_VD, narrow_dw.float(), relative=2.0**-8)


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_shards_of_the_vocabulary_make_the_whole(softcap: float | None) -> None:
    x_ND, weight_VD, target_N = problem()
    want = linear_cross_entropy_plain(x_ND, weight_VD, target_N, softcap)
    parts, first = [], 0
    for shard in weight_VD.detach().split([7, 13, 30]):
        parts.append(vocab_shard_statistics(x_ND, shard, target_N, first, softcap, chunk=9))
        first += len(shard)
    whole = merge_statistics(parts)
    close(whole.lse_N, want.lse_N)
    nll_N = (whole.lse_N - whole.correct_N)[target_N >= 0]
    close(nll_N.sum(), want.nll_sum)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head(tied: bool) -> None:
    config = replace(ModelConfig(), dim=D, vocab_size=V, logit_softcap=2.5, z_loss=1e-3)
    embedding = torch.nn.Parameter(torch.empty(V, D)) if tied else None
    head = LanguageModelHead(config, tied=embedding).double()
    assert (head.weight is embedding) == tied
    initialise(head, head.init_rules(), seed=1)
    x_ND, _, target_N = problem()
    out = head(x_ND.unflatten(0, (1, N)), target_N[None])
    assert isinstance(out, LossSum)
    logits_NV = head.logits(x_ND)
    assert logits_NV.abs().max() < 2.5
    close(out.nll_sum, F.cross_entropy(logits_NV, target_N, reduction="sum").detach())
    z_sum = (logits_NV.logsumexp(1).square() * (target_N >= 0)).sum()
    close(out.loss_sum, out.nll_sum + 1e-3 * z_sum)


def test_fsdp_sees_the_tensors_inside_a_loss() -> None:
    loss = LossSum(*(torch.tensor(float(i)) for i in range(4)))
    leaves = tree_leaves(loss)
    assert [leaf.item() for leaf in leaves] == [0, 1, 2, 3]


def test_a_sum_in_fp16_overflows_only_once_it_is_scaled() -> None:
    """The gradient of a frequent word, beyond 65,504 before it is divided by the tokens."""
    tokens, word = 2**15, torch.full((2**15,), 7)
    grads = []
    for dtype in (torch.float32, torch.float16):
        x_ND = torch.full((tokens, 4), 4.0, dtype=dtype)
        weight_VD = torch.zeros(16, 4, dtype=dtype, requires_grad=True)
        (linear_cross_entropy(x_ND, weight_VD, word).loss_sum / tokens).backward()
        assert weight_VD.grad is not None and weight_VD.grad.dtype == dtype
        grads.append(weight_VD.grad.float())
    assert grads[0].abs().max() * tokens > 65504
    assert torch.allclose(*grads, rtol=2.0**-10)


def test_chunks_cost_about_as_much_as_their_input() -> None:
    for tokens, dim, vocab in ((4096, 512, 4096), (2048, 256, 2048), (65536, 4096, 131072)):
        x_ND, weight_VD = (torch.empty(s, device="meta") for s in ((tokens, dim), (vocab, dim)))
        logits = chunk_rows(x_ND, weight_VD) * vocab
        assert x_ND.numel() <= logits < 2 * x_ND.numel() or logits == 128 * vocab
    assert chunk_rows(torch.empty(5, 8), torch.empty(99, 8)) == 5


def test_memory_the_logits_never_exist() -> None:
    """1024 tokens, vocabulary 4096, D 64, fp32: what forward and backward hold at once.

    Plain: logits, log-probabilities and a gradient of their size, 16 MiB each. Fused: one chunk of
    128 x 4096 logits (2 MiB), the gradients of x (0.25 MiB) and weight (1 MiB), and a few numbers
    per token.
    """
    tokens, dim, vocab = 1024, 64, 4096

    def plain(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x_ND, weight_VD), target_N)

    def fused(x_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
        return linear_cross_entropy(x_ND, weight_VD, target_N, z_loss=1e-4).loss_sum / tokens

    def measure(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> LiveBytes:
        g = torch.Generator().manual_seed(1)
        x_ND = torch.randn(tokens, dim, generator=g).requires_grad_()
        weight_VD = torch.randn(vocab, dim, generator=g).requires_grad_()
        target_N = torch.randint(vocab, (tokens,), generator=g)
        with LiveBytes() as live:
            function(x_ND, weight_VD, target_N).backward()
        assert live.now == gradient_bytes, "only the two gradients stay"
        return live

    logits_bytes, chunk_bytes = 4 * tokens * vocab, 4 * 128 * vocab
    gradient_bytes = 4 * (tokens * dim + vocab * dim)
    whole, chunked = measure(plain), measure(fused)
    assert whole.largest == logits_bytes and chunked.largest == chunk_bytes
    assert whole.peak >= 3 * logits_bytes
    assert chunked.peak < 1.02 * (chunk_bytes + gradient_bytes)
    assert whole.peak > 14 * chunked.peak


def test_live_bytes_counts_a_storage_once_and_until_it_is_freed() -> None:
    known = torch.zeros(1000)
    with LiveBytes() as live:
        a = torch.ones(256)
        b = a.view(16, 16)[3:]
        known.add_(1.0)
        assert live.now == 1024
        del a
        assert live.now == 1024  # b still holds the storage
        c = b * 2
        del b
        assert live.now == 4 * 13 * 16
        c.clone()
        assert live.now == live.largest - 1024 + 4 * 13 * 16
    assert live.peak == 1024 + 4 * 13 * 16 and live.largest == 1024
