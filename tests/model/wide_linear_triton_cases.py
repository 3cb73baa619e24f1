"""Triton kernels of a product with a wide weight against fp64: run by test_wide_linear.py.

TRITON_INTERPRET=1 python -m pytest tests/model/wide_linear_triton_cases.py   (on a GPU without it)
"""

from __future__ import annotations

import os

import pytest
import torch

from megacpp.kernels.linears import wide_linear
from tests.model.triton_interpreter import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    mend()


@pytest.mark.parametrize(
    ("rows", "width", "outputs"),
    [(70, 24, 5), (64, 64, 16), (133, 96, 12), (600, 64, 3), (33, 40, 70), (0, 8, 4)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_definition(rows: int, width: int, outputs: int, dtype: torch.dtype) -> None:
    """Product and both gradients, to a few roundings of fp32; the input's to one of its dtype."""
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=DEVICE).to(dtype).requires_grad_()
    w = torch.randn(outputs, width, device=DEVICE, requires_grad=True)
    dy = torch.randn(rows, outputs, device=DEVICE)
    y, beside = wide_linear(x, w, "triton")
    dx, dw = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    assert y.dtype == dw.dtype == torch.float32 and dx.dtype == dtype
    want = x.detach().double() @ w.detach().double().T
    wants = [want, dy.double() @ w.detach().double(), dy.double().T @ x.detach().double()]
    limits = 2e-6, torch.finfo(dtype).eps, 2e-6
    for got, right, limit in zip((y, dx, dw), wants, limits, strict=True):
        assert (got.double() - right).norm() <= limit * right.norm()
    plus = torch.randn(rows, width, device=DEVICE).to(dtype)
    (both,) = torch.autograd.grad((y, beside), x, (dy, plus))
    right = wants[1] + plus.double()
    assert (both.double() - right).norm() <= torch.finfo(dtype).eps * right.norm()


def test_some_gradients() -> None:
    """Only what is asked for is made, and a strided gradient is read as it lies."""
    x = torch.randn(40, 32, device=DEVICE).bfloat16()
    w = torch.randn(32, 6, device=DEVICE).T.requires_grad_()
    dy = torch.ones(6, 40, device=DEVICE).T
    (dw,) = torch.autograd.grad(wide_linear(x, w, "triton")[0], w, dy)
    want = torch.ones(6, 40, device=DEVICE).double() @ x.double()
    assert (dw.double() - want).norm() <= 2e-6 * want.norm()


def test_wide_inputs_take_torch() -> None:
    x, w = torch.randn(9, 8, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    assert torch.equal(wide_linear(x, w, "triton")[0], wide_linear(x, w)[0])
