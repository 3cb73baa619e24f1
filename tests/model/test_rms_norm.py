"""RMSNorm against torch's operator: forward bit for bit, gradients in fp64 and narrow types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpointing.tracing.live_bytes import LiveBytes
from megacpp.kernels.rms_norm import rms_norm, rms_norm_reference
from megacpp.model.init import initialise
from megacpp.model.norm import RMSNorm

EPS = 1e-5
SHAPES = [(2, 5, 16), (1, 3, 2, 8), (7, 24), (12,), (0, 8)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, an uneven weight under the fp32 contract, and a gradient."""
    weight_D = 1.0 + noise(shape[-1], seed=1)
    if dtype != torch.float64:
        weight_D = weight_D.float()
    x, dy = noise(*shape).to(dtype), noise(*shape, seed=2).to(dtype)
    return x.requires_grad_(), weight_D.requires_grad_(), dy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_torchs_operator(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Gradients differ by the order of sums in fp32, then by one rounding to the narrow type."""
    x, weight_D, dy = case(shape, dtype)
    results = []
    for form in (rms_norm_reference, rms_norm):
        y = form(x, weight_D, EPS)
        results.append((y, *torch.autograd.grad(y, (x, weight_D), dy)))
    (want_y, *want), (y, *got) = results
    assert torch.equal(y, want_y) and y.dtype == dtype
    sums = 1e-12 if dtype == torch.float64 else 1e-5
    for of, limit in zip(range(2), (max(sums, torch.finfo(dtype).eps), sums), strict=True):
        assert got[of].dtype == want[of].dtype
        error, size = (got[of] - want[of]).double().norm(), want[of].double().norm()
        assert error <= limit * size, (error / size).item()


def test_gradients_are_those_of_the_function() -> None:
    x, weight_D, _ = case((3, 4, 6), torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x, weight_D))


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)])
def test_a_stream_beside_its_norm(asked: tuple[bool, bool]) -> None:
    """x goes on as it is, and its gradient has both parts; also where one factor alone is asked."""
    x, weight_D, dy = case((3, 4, 6), torch.float64)
    x.requires_grad_(asked[0]), weight_D.requires_grad_(asked[1])
    y, stream = rms_norm(x, weight_D, EPS, beside=True)
    assert torch.equal(stream, x) and stream.data_ptr() == x.data_ptr()
    given = [t for t, wanted in zip((x, weight_D), asked, strict=True) if wanted]
    got = torch.autograd.grad((y * stream.sin()).mul(dy).sum(), given)
    want = torch.autograd.grad((rms_norm(x, weight_D, EPS) * x.sin()).mul(dy).sum(), given)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-15 * b.norm()


def test_strided_input_and_expanded_gradient() -> None:
    """A latent is a slice of a wider projection; a sum's gradient is one number, expanded."""
    wide = noise(2, 5, 20).requires_grad_()
    _, weight_D, _ = case((12,), torch.float64)
    results = []
    for form in (rms_norm_reference, rms_norm):
        y = form(wide[..., 3:15], weight_D, EPS)
        results.append(torch.autograd.grad(y.sum(), (wide, weight_D)))
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_no_wide_copy(dtype: torch.dtype) -> None:
    x, weight_D, _ = case((4, 32, 64), dtype)
    with LiveBytes() as live:
        total = rms_norm(x, weight_D, EPS).sum()  # its graph holds what backward reads
        assert live.alive() == 4 * 32 * 4 + total.nbytes  # 1 / rms of each row in fp32, beside x


def test_inputs_and_weights_in_two_walks() -> None:
    """A zero-bubble pipeline asks for one, keeps the graph, and asks for the other."""
    x, weight_D, dy = case((4, 8), torch.float64)
    want = torch.autograd.grad(rms_norm_reference(x, weight_D, EPS), (x, weight_D), dy)
    y = rms_norm(x, weight_D, EPS)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (dw_D,) = torch.autograd.grad(y, weight_D, dy)
    assert (dx - want[0]).abs().max() < 1e-12 and (dw_D - want[1]).abs().max() < 1e-12


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_autocast_rounds_the_result_and_nothing_else(amp: torch.dtype) -> None:
    """As the linear layers that read it would, each for itself."""
    x, weight_D, dy = case((4, 8), torch.float32)
    y = rms_norm(x, weight_D, EPS).to(amp)
    want = torch.autograd.grad(y, (x, weight_D), dy.to(amp))
    with torch.autocast("cpu", amp):
        narrow = rms_norm(x, weight_D, EPS)
        got = torch.autograd.grad(narrow, (x, weight_D), dy.to(amp))
    assert torch.equal(narrow, y)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_row_that_overflows_has_no_gradient() -> None:
    """Its squares are infinite, so it comes out as zeros; the others have theirs."""
    x, weight_D, dy = case((4, 8), torch.float32)
    with torch.no_grad():
        x[1] = 1e30
    y = rms_norm(x, weight_D, EPS)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert (y[1] == 0).all() and dx[1].isnan().all()
    assert dx[[0, 2, 3]].isfinite().all()


def test_the_module_holds_its_weight_under_the_contract() -> None:
    norm = RMSNorm(8, EPS)
    initialise(norm, norm.init_rules(), seed=0)
    norm.bfloat16()
    x = noise(3, 8).bfloat16()
    assert norm.weight.dtype == torch.float32 and torch.equal(norm.weight, torch.ones(8))
    assert torch.equal(norm(x), rms_norm_reference(x, norm.weight, EPS))
    with torch.no_grad():
        assert torch.equal(norm(x), rms_norm_reference(x, norm.weight, EPS))
    assert norm.to("meta")(x.to("meta")).shape == (3, 8)
