"""Cases of the Triton backend of the loss: on a GPU, else in Triton's interpreter.

Not collected by name: tests/model/test_loss_triton.py runs this file in a process of its own, as
Triton looks for its interpreter when it is imported.

Legend: N tokens, D model, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.kernels.linear_cross_entropy import triton as linear_cross_entropy_triton
from megacpp.kernels.linear_cross_entropy.chunked import (
    CrossEntropy,
    ShardStatistics,
    VocabularyShard,
    linear_cross_entropy,
    merge_statistics,
)
from megacpp.kernels.linear_cross_entropy.reference import linear_cross_entropy_plain
from megacpp.kernels.linear_cross_entropy.triton import statistics
from megacpp.kernels.token_order import TokensAhead, token_order_loss
from tests.golden import check_linear_ce
from tests.golden.harness import GoldenFile
from tests.model.triton_interpreter import mend

if knobs.runtime.interpret:
    mend()
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
GOLDEN = Path(__file__).parents[1] / "golden/data"
TIGHT = {torch.float32: 1e-5, torch.float64: 1e-12}
fused = partial(linear_cross_entropy, backend="triton")


def problem(
    N: int, V: int, dtype: torch.dtype = torch.float32, D: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, and targets of which each third is ignored."""
    g = torch.Generator().manual_seed(7 * N + V)
    x_ND = torch.randn(N, D, generator=g).to(DEVICE, dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=g).to(DEVICE, dtype).requires_grad_()
    target_N = torch.randint(V, (N,), generator=g)
    target_N[::3] = -100
    return x_ND, weight_VD, target_N.to(DEVICE)


def close(got: Tensor, want: Tensor, relative: float) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    error, scale = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= relative * scale, f"{error:.2e} > {relative:.0e} * {scale:.2e}"


def same(got: CrossEntropy, want: CrossEntropy, leaves: tuple[Tensor, ...], limit: float) -> None:
    for a, b in zip(got, want, strict=True):
        close(a, b, limit)
    grads = (torch.autograd.grad(out.loss_sum * 0.37, leaves) for out in (got, want))
    for a, b in zip(*grads, strict=True):
        close(a, b, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("N, V, chunk", [(37, 50, 8), (3, 16500, 2), (9, 4096, 4), (1, 1, 1)])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_equals_the_plain_loss(
    z_loss: float, softcap: float | None, N: int, V: int, chunk: int, dtype: torch.dtype
) -> None:
    x_ND, weight_VD, target_N = problem(N, V, dtype)
    got = fused(x_ND, weight_VD, target_N, softcap, z_loss, chunk)
    want = linear_cross_entropy_plain(x_ND, weight_VD, target_N, softcap, z_loss)
    if N > 1:
        same(got, want, (x_ND, weight_VD), TIGHT[dtype])
    else:  # its one target is ignored
        assert got.loss_sum.item() == got.valid_tokens.item() == 0
        for gradient in torch.autograd.grad(got.loss_sum, (x_ND, weight_VD)):
            assert not gradient.count_nonzero()


@pytest.mark.parametrize("softcap, z_loss", [(None, 0.0), (2.5, 1e-2)])
def test_weighted_tokens(softcap: float | None, z_loss: float) -> None:
    """What further tokens (MTP) ask for: a factor for each."""
    x_ND, weight_VD, target_N = problem(37, 83)
    weight_N = torch.rand(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = [
        linear_cross_entropy(
            x_ND, weight_VD, target_N, softcap, z_loss, 8, weight_N=weight_N, backend=backend
        )
        for backend in ("triton", "torch")
    ]
    same(*losses, (x_ND, weight_VD), 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_shards_of_the_vocabulary(
    softcap: float | None, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard in turn, the others' statistics merged as ranks would: loss and dw are the
    whole's, and the parts of dx add up to it."""
    monkeypatch.setattr(linear_cross_entropy_triton, "BLOCK", 8)  # several of a shard
    monkeypatch.setattr(linear_cross_entropy_triton, "ROW_BLOCK", 8)
    x_ND, weight_VD, target_N = problem(37, 50)
    want = linear_cross_entropy_plain(x_ND, weight_VD, target_N, softcap, z_loss)
    want_dx, want_dw = torch.autograd.grad(want.loss_sum, (x_ND, weight_VD))
    cuts = [(0, 7), (7, 20), (20, 50)]
    start, dx_ND = 0, torch.zeros_like(want_dx)
    for first, last in cuts:
        start = 0

        def merge(own: ShardStatistics, mine: int = first) -> ShardStatistics:
            nonlocal start
            part = slice(start, start + len(own.max_N))
            start = part.stop
            found = []
            for a, b in cuts:
                logits_nv = (x_ND[part] @ weight_VD[a:b].T).detach()
                theirs = statistics(logits_nv, target_N[part], a, softcap)
                found.append(own if a == mine else theirs)
            return merge_statistics(found)

        shard = VocabularyShard(first, merge)
        part_vD = weight_VD[first:last].detach().requires_grad_()
        got = fused(x_ND, part_vD, target_N, softcap, z_loss, 16, shard)
        close(got.loss_sum, want.loss_sum, 1e-5)
        close(got.lse_N, want.lse_N, 1e-5)
        part_dx, part_dw = torch.autograd.grad(got.loss_sum, (x_ND, part_vD))
        dx_ND += part_dx
        close(part_dw, want_dw[first:last], 1e-5)
    close(dx_ND, want_dx, 1e-5)


@pytest.mark.parametrize("wanted", ["x", "weight", "neither"])
def test_gradients_only_where_they_are_wanted(wanted: str) -> None:
    x_ND, weight_VD, target_N = problem(37, 50)
    x_ND.requires_grad_(wanted == "x")
    weight_VD.requires_grad_(wanted == "weight")
    out = fused(x_ND, weight_VD, target_N)
    assert out.loss_sum.requires_grad == (wanted != "neither")
    want = linear_cross_entropy_plain(x_ND, weight_VD, target_N)
    leaves = tuple(t for t in (x_ND, weight_VD) if t.requires_grad)
    if leaves:
        same(out, want, leaves, 1e-5)
    close(out.nll_sum, want.nll_sum, 1e-5)


def test_no_token_at_all() -> None:
    _, weight_VD, target_N = problem(3, 50)
    empty_ND = torch.empty(0, 12, device=DEVICE, requires_grad=True)
    out = fused(empty_ND, weight_VD, target_N[:0])
    assert out.loss_sum.item() == 0
    for gradient in torch.autograd.grad(out.loss_sum, (empty_ND, weight_VD)):
        assert not gradient.count_nonzero()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x_ND, weight_VD, target_N = problem(8, 50)
    with torch.no_grad():
        x_ND[1, 0] = value
    out = fused(x_ND, weight_VD, target_N)
    assert not out.loss_sum.isfinite()
    (dx_ND,) = torch.autograd.grad(out.loss_sum, x_ND)
    assert dx_ND[1].isnan().all() and dx_ND[2].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_bf16(softcap: float | None) -> None:
    """Products rounded to bf16 are the same numbers for both; so are the statistics but for the
    order of sums. A gradient may fall on the other side of a rounding, 2^-7 of itself, and so may
    a product of it, 2^-7 again; the largest result stands for the terms of a sum."""
    x_ND, weight_VD, target_N = problem(64, 999, torch.bfloat16, D=64)
    got = fused(x_ND, weight_VD, target_N, softcap, 1e-3, 16)
    want = linear_cross_entropy(x_ND, weight_VD, target_N, softcap, 1e-3, 16)
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-5)
    grads = (torch.autograd.grad(out.loss_sum, (x_ND, weight_VD)) for out in (got, want))
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b.float()).abs().max() <= 2.0**-6 * b.float().abs().max()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("linear_ce*")), ids=lambda p: p.stem)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.skipif(GPU, reason="stored results are read onto the CPU")
def test_golden(path: Path, dtype: torch.dtype) -> None:
    golden = GoldenFile(path, dtype)
    check_linear_ce.check(golden, backend="triton")
    golden.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_one_chunk_and_no_more_than_the_torch_form(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 tokens, vocabulary 4096: 128 x 4096 logits in the dtype of the products, once."""
    tokens, dim, vocab = 256, 32, 4096
    chunk = linear_cross_entropy_triton.chunk

    def collected(*args: Any) -> Any:
        gc.collect()  # the interpreter holds arguments of a launch in a cycle
        return chunk(*args)

    monkeypatch.setattr(linear_cross_entropy_triton, "chunk", collected)

    def live(backend: str) -> tuple[LiveBytes, int]:
        x_ND, weight_VD, target_N = problem(tokens, vocab, dtype, dim)
        with LiveBytes() as found:
            out = linear_cross_entropy(x_ND, weight_VD, target_N, 2.5, 1e-4, backend=backend)
            gc.collect()
            kept = found.now
            out.loss_sum.backward()
        return found, kept

    (triton_form, kept), (torch_form, torch_kept) = live("triton"), live("torch")
    chunk_bytes = 128 * vocab * dtype.itemsize
    gradients = (tokens * dim + vocab * dim) * dtype.itemsize + vocab * dim * 4
    assert kept == torch_kept
    assert triton_form.peak < torch_form.peak
    if dtype == torch.float32 or GPU:  # a CPU widens a narrow chunk for the weight's gradient
        assert triton_form.largest == max(chunk_bytes, vocab * dim * 4)
        apart = vocab * dim * 4 if dtype == torch.bfloat16 else 0  # a product that is added to dw
        assert triton_form.peak < 1.05 * (chunk_bytes + gradients + apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [False, True])
def test_token_order(cut: bool, dtype: torch.dtype) -> None:
    """In bf16 a gradient is rounded twice where a word is ahead, and a product of it once more,
    each of them 2^-8 of itself and maybe to the other side: 2^-6 of the largest result."""
    x_ND, weight_VD, target_N = problem(37, 51, dtype)
    ids_BT = target_N.clamp(min=0)[None]
    ends_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    ends_BT[:, [20, 36]] = True
    ahead = TokensAhead.from_rows(ids_BT, ends_BT, 5)

    def doubled(own: ShardStatistics) -> ShardStatistics:
        other = ShardStatistics(own.max_N + 1, own.sumexp_N * 0.5, own.correct_N * 0)
        return merge_statistics([own, other])

    shard = VocabularyShard(3, doubled) if cut else None
    call: Callable[..., Tensor] = partial(token_order_loss, x_ND, weight_VD, ahead, 8, shard)
    got, want = call(backend="triton"), call()
    close(got, want, 1e-5)
    grads = (torch.autograd.grad(loss, (x_ND, weight_VD)) for loss in (got, want))
    for a, b in zip(*grads, strict=True):
        close(a.float(), b.float(), 1e-5 if dtype == torch.float32 else 2.0**-6)
