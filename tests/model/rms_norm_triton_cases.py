"""RMSNorm by Triton against torch's operator in fp64: run by test_rms_norm_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/model/rms_norm_triton_cases.py   (or on a GPU, without it)
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from megacpp.kernels import triton_rms_norm
from megacpp.kernels.rms_norm import rms_norm, rms_norm_reference
from tests.model.triton_interpreter import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    mend()
EPS = 1e-5
# More rows than programs take at once, a width that no block divides, and one row.
SHAPES = [(3, 70, 24), (2, 1100), (5, 4100), (300, 3), (7,), (0, 8)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several blocks of rows."""
    monkeypatch.setattr(triton_rms_norm, "PROGRAMS", 2)
    monkeypatch.setattr(triton_rms_norm, "TILE", 256)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(x: Tensor, dy: Tensor, narrow: torch.dtype | None = None) -> None:
    """Results and both gradients within rounding: sums in fp32, then once to the dtype."""
    weight_D = (1.0 + noise(x.shape[-1], seed=1)).float()
    wide = [x.double().cpu().requires_grad_(), weight_D.double().requires_grad_()]
    want_y = rms_norm_reference(wide[0], wide[1], EPS)
    want = want_y, *torch.autograd.grad(want_y, wide, dy.double())
    given = x.to(DEVICE).requires_grad_(), weight_D.to(DEVICE).requires_grad_()
    with torch.autocast(DEVICE, narrow, enabled=narrow is not None):
        y = rms_norm(*given, EPS, "triton")
    got = y, *torch.autograd.grad(y, given, dy.to(DEVICE))
    assert [t.dtype for t in got] == [narrow or x.dtype, x.dtype, torch.float32]
    for a, b in zip(got, want, strict=True):
        limit = 2 * torch.finfo(a.dtype).eps + 1e-5
        assert (a.double().cpu() - b).norm() <= limit * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(noise(*shape).to(dtype), noise(*shape, seed=2).to(dtype))


def test_a_wide_stream_under_autocast() -> None:
    check(noise(6, 40).float(), noise(6, 40, seed=2).bfloat16(), torch.bfloat16)


def test_rows_with_gaps() -> None:
    """Groups of heads within wider rows; a gradient whose rows lie apart; more dims than two."""
    wider, dy = noise(2, 9, 4, 16).float().to(DEVICE), noise(2, 9, 8, seed=2).float()
    check(wider[:, :, 1:3, :8], noise(2, 9, 2, 8, seed=3).float())
    check(wider[:, :, 0, :8], dy.transpose(0, 1).contiguous().transpose(0, 1))
    check(wider[:, ::2, ::3, 3:11], noise(2, 5, 2, 8, seed=4).float())
    check(wider[..., 0], noise(2, 9, 4, seed=5).float())


def test_one_gradient_alone() -> None:
    x, weight_D = noise(9, 12).float().to(DEVICE), noise(12, seed=1).float().to(DEVICE)
    dy = noise(9, 12, seed=2).float().to(DEVICE)
    both = triton_rms_norm.backward(
        dy, x, weight_D, triton_rms_norm.forward(x, weight_D, EPS, x.dtype)[1], (True, True)
    )
    for i in range(2):
        given = x.clone().requires_grad_(i == 0), weight_D.clone().requires_grad_(i == 1)
        (one,) = torch.autograd.grad(rms_norm(*given, EPS, "triton"), given[i], dy)
        assert torch.equal(one, both[i])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stream_beside_its_norm(dtype: torch.dtype) -> None:
    """The stream's gradient is added before the sum is rounded; one whose rows lie apart, too."""
    x, weight_D = noise(3, 70, 24).to(dtype).to(DEVICE).requires_grad_(), noise(24, seed=1).float()
    dy = noise(3, 70, 24, seed=2).to(dtype).to(DEVICE)
    beside = noise(70, 3, 24, seed=3).to(dtype).to(DEVICE).transpose(0, 1)
    y, stream = rms_norm(x, weight_D.to(DEVICE), EPS, "triton", beside=True)
    (got,) = torch.autograd.grad((y, stream), x, (dy, beside))
    wide = x.detach().double().cpu().requires_grad_()
    want_y = rms_norm_reference(wide, weight_D.double(), EPS)
    (want,) = torch.autograd.grad(want_y, wide, dy.double().cpu())
    want = want + beside.double().cpu()
    assert got.dtype == dtype
    limit = torch.finfo(dtype).eps + 1e-6
    assert (got.double().cpu() - want).norm() <= limit * want.norm()


def test_a_row_that_overflows_has_no_gradient() -> None:
    x, dy = noise(4, 8).float(), noise(4, 8, seed=2).float().to(DEVICE)
    x[1] = 1e30
    x = x.to(DEVICE).requires_grad_()
    y = rms_norm(x, torch.ones(8, device=DEVICE), EPS, "triton")
    (dx,) = torch.autograd.grad(y, x, dy)
    assert (y[1] == 0).all() and dx[1].isnan().all() and dx[[0, 2, 3]].isfinite().all()
