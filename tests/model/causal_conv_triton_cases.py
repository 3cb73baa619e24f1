"""The short convolution by Triton against its fp64 form: run by test_causal_conv_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/model/causal_conv_triton_cases.py   (without it on a GPU)
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from megacpp.kernels import triton_causal_conv
from megacpp.kernels.causal_conv import Activation, causal_conv
from megacpp.model.documents import Documents
from tests.model.triton_interpreter import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    mend()
LENGTHS = ((1, 2, 7, 13), (3, 20))  # shorter than taps reach; a tile's end inside a document
PACKED = Documents.from_ids(
    torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in LENGTHS])
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that cross rows, and programs that take several."""
    monkeypatch.setattr(triton_causal_conv, "TOKENS", 8)
    monkeypatch.setattr(triton_causal_conv, "CHANNELS", 4)
    monkeypatch.setattr(triton_causal_conv, "PROGRAMS", 6)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(
    x: Tensor,
    dy: Tensor,
    docs: Documents | None,
    taps: int = 4,
    activation: Activation = "silu",
    dilation: int = 1,
) -> None:
    """Output and gradients are those in fp64, rounded from fp32 once."""
    weight = noise(x.shape[-1], 1, taps, seed=1).to(x.dtype)
    wide = [t.double().cpu().requires_grad_() for t in (x, weight)]
    want = causal_conv(*wide, docs, activation, dilation)  # type: ignore[misc]
    want = want, *torch.autograd.grad(want, wide, dy.double().cpu())
    given = [x.to(DEVICE).requires_grad_(), weight.float().to(DEVICE).requires_grad_()]
    there = None if docs is None else docs.to(DEVICE)
    y = causal_conv(*given, there, activation, dilation, "triton")  # type: ignore[misc]
    got = y, *torch.autograd.grad(y, given, dy.to(DEVICE))
    assert [t.dtype for t in got] == [x.dtype, x.dtype, torch.float32]
    for a, b in zip(got, want, strict=True):
        limit = torch.finfo(a.dtype).eps + 1e-6
        assert a.shape == b.shape
        assert (a.double().cpu() - b).abs().max() <= limit * b.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("docs", [None, PACKED], ids=["whole", "packed"])
def test_it_is_the_fp64_form(dtype: torch.dtype, docs: Documents | None) -> None:
    check(noise(2, 23, 10).to(dtype), noise(2, 23, 10, seed=2).to(dtype), docs)


@pytest.mark.parametrize("docs", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("taps", [1, 2, 3, 6])
@pytest.mark.parametrize("dilation", [1, 5])
def test_any_taps(taps: int, dilation: int, docs: Documents | None) -> None:
    """Compare one to six taps, near and far apart, and three without an activation."""
    x, dy = noise(2, 23, 3).float(), noise(2, 23, 3, seed=2).float()
    check(x, dy, docs, taps, None if taps == 3 else "silu", dilation)


def test_a_row_that_is_shorter_than_taps_reach() -> None:
    check(noise(3, 2, 5).float(), noise(3, 2, 5, seed=2).float(), None)


def test_positions_that_began_in_an_earlier_chunk() -> None:
    """A rank's segments go on with a document; only its own tokens are there to be read."""
    docs = Documents(PACKED.ids_BT[:, 4:], PACKED.positions_BT[:, 4:])
    check(noise(2, 19, 4).float(), noise(2, 19, 4, seed=2).float(), docs)


def test_tokens_that_lie_apart() -> None:
    """Channels of a wider projection, and a gradient of every other token."""
    wider, dy = noise(2, 23, 12).float().to(DEVICE), noise(2, 46, 5, seed=2).float()
    check(wider[..., 3:8], dy[:, ::2], PACKED)
    check(wider[..., ::2], noise(2, 6, 23, seed=3).float().mT, PACKED)


def test_no_tokens() -> None:
    x, weight = noise(2, 0, 3).float().to(DEVICE), noise(3, 1, 4).float().to(DEVICE)
    given = x.requires_grad_(), weight.requires_grad_()
    y = causal_conv(*given, None, backend="triton")
    dx, dweight = torch.autograd.grad(y.sum(), given)
    assert y.shape == dx.shape == x.shape and not dweight.any()


def test_another_documents_nan_stays_there() -> None:
    x = noise(2, 23, 4).float()
    x[0, 2] = float("nan")  # the last token of the second document
    x = x.to(DEVICE).requires_grad_()
    weight = noise(4, 1, 4, seed=1).float().to(DEVICE)
    y = causal_conv(x, weight, PACKED.to(DEVICE), backend="triton")
    (dx,) = torch.autograd.grad(y[0, 3:].sum() + y[1].sum() + y[0, 0].sum(), x)
    assert y[0, 2].isnan().all() and y[0, 3:].isfinite().all() and y[1].isfinite().all()
    assert dx[0, 3:].isfinite().all() and dx[1].isfinite().all()
