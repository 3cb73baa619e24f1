"""The short convolution: fast form, reference and single steps agree and respect documents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.causal_conv import Activation, causal_conv
from megacpp.kernels.causal_conv_steps import causal_conv_sequential, causal_conv_step
from megacpp.model.documents import Documents

# Documents of one row, lengths 1 and below the kernel included.
IDS = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 3, 4], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])


def random_case(num_taps: int, tokens: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_taps)
    x_BTC = torch.randn(2, tokens, 5, dtype=torch.float64, requires_grad=True)
    weight_C1K = torch.randn(5, 1, num_taps, dtype=torch.float64, requires_grad=True)
    return x_BTC, weight_C1K


@pytest.mark.parametrize("num_taps", [1, 2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("docs", [None, Documents.from_ids(IDS)], ids=["whole", "packed"])
@pytest.mark.parametrize("dilation", [1, 3])
def test_fast_form_equals_token_by_token(
    num_taps: int, activation: Activation, docs: Documents | None, dilation: int
) -> None:
    x_BTC, weight_C1K = random_case(num_taps)
    results = []
    for form in (causal_conv, causal_conv_sequential):
        y_BTC = form(x_BTC, weight_C1K, docs, activation, dilation)
        weighted = (y_BTC * torch.linspace(-1, 1, y_BTC.numel()).view_as(y_BTC)).sum()
        results.append((y_BTC, *torch.autograd.grad(weighted, (x_BTC, weight_C1K))))
    for fast, reference in zip(*results, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-12, atol=1e-12)


def test_equals_torch_conv1d_on_whole_rows() -> None:
    x_BTC, weight_C1K = random_case(4)
    padded_BCT = F.pad(x_BTC.transpose(1, 2), (3, 0))
    want = F.silu(F.conv1d(padded_BCT, weight_C1K, groups=5)).transpose(1, 2)
    got = causal_conv(x_BTC, weight_C1K, None)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_taps_that_are_apart_are_a_longer_kernel_with_zeros_between() -> None:
    x_BTC, weight_C1K = random_case(3)
    sparse_C1K = torch.zeros(5, 1, 7, dtype=torch.float64)
    sparse_C1K[..., ::3] = weight_C1K.detach()
    for docs in (None, Documents.from_ids(IDS)):
        got = causal_conv(x_BTC, weight_C1K, docs, dilation=3)
        assert torch.equal(got, causal_conv(x_BTC, sparse_C1K, docs))


@pytest.mark.parametrize("dilation", [1, 2, 5])
def test_row_shorter_than_the_kernel(dilation: int) -> None:
    x_BTC, weight_C1K = random_case(4, tokens=2)
    got = causal_conv(x_BTC, weight_C1K, None, None, dilation)
    want = causal_conv_sequential(x_BTC, weight_C1K, None, None, dilation)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    got.sum().backward()
    assert x_BTC.grad is not None


def test_documents_are_isolated_bit_for_bit() -> None:
    docs = Documents.from_ids(IDS)
    results = []
    for change in (0.0, 1.0):
        x_BTC, weight_C1K = random_case(4)
        with torch.no_grad():
            x_BTC[0, 4] += change  # in document 2 of row 0: tokens 3 to 7
        y_BTC = causal_conv(x_BTC, weight_C1K, docs)
        y_BTC.square().sum().backward()
        results.append((y_BTC.detach(), x_BTC.grad))
    others = torch.ones(2, 10, dtype=torch.bool)
    others[0, 3:8] = False
    for before, after in zip(*results, strict=True):
        assert before is not None and after is not None
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[~others], after[~others])


def test_nothing_not_even_nan_crosses_a_document() -> None:
    x_BTC, weight_C1K = random_case(4)
    with torch.no_grad():
        x_BTC[0, 1] = torch.nan
    y_BTC = causal_conv(x_BTC, weight_C1K, Documents.from_ids(IDS))
    assert y_BTC[0, 1].isnan().all() and y_BTC[0, 2:].isfinite().all()


@pytest.mark.parametrize("num_taps", [1, 4])
def test_steps_equal_the_whole_row(num_taps: int) -> None:
    x_BTC, weight_C1K = random_case(num_taps)
    taps_BCK1 = torch.zeros(2, 5, num_taps - 1, dtype=torch.float64)
    ys = []
    for t in range(x_BTC.shape[1]):
        y_BC, taps_BCK1 = causal_conv_step(x_BTC[:, t], taps_BCK1, weight_C1K, "silu")
        ys.append(y_BC)
    want = causal_conv(x_BTC, weight_C1K, None)
    torch.testing.assert_close(torch.stack(ys, 1), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_bf16_sums_in_fp32_and_keeps_only_its_input(activation: Activation) -> None:
    x_BTC, weight_C1K = (t.detach().bfloat16().requires_grad_() for t in random_case(4))
    docs = Documents.from_ids(IDS)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y_BTC = causal_conv(x_BTC, weight_C1K, docs, activation)
    assert y_BTC.dtype == torch.bfloat16
    if activation is None:
        # One rounding to bf16 at the end: half a unit in the last of 8 bits.
        exact = causal_conv(x_BTC.double(), weight_C1K.double(), docs, None)
        assert torch.all((y_BTC.double() - exact).abs() <= exact.abs() * 2.0**-8)
    else:
        assert torch.equal(y_BTC, F.silu(causal_conv(x_BTC, weight_C1K, docs, None)))
    assert sum(t.numel() for t in kept) == x_BTC.numel() + weight_C1K.numel()
    y_BTC.sum().backward()
    assert x_BTC.grad is not None and x_BTC.grad.dtype == torch.bfloat16
