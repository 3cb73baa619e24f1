"""Decays and gates by Triton against their fp64 forms: run by test_gates_triton.py.

TRITON_INTERPRET=1 python -m pytest tests/model/gates_triton_cases.py   (or on a GPU, without it)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.kernels import triton_gates
from megacpp.kernels.gated import gated
from megacpp.kernels.linears import gated_linear
from megacpp.kernels.recurrent_gates import (
    decay,
    gated_ranks,
    gated_residual,
    in_triton,
    steps,
)
from megacpp.kernels.rms_norm import rms_norm_reference
from tests.model.triton_interpreter import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    mend()
WIDTHS = [5, 16, 40]  # padded, whole, and several blocks of columns
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Gate = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that take several tiles, which cross rows."""
    monkeypatch.setattr(triton_gates, "TILE", 64)
    monkeypatch.setattr(triton_gates, "COLUMNS", 16)
    monkeypatch.setattr(triton_gates, "PROGRAMS", 3)


def noise(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(shape, dtype=torch.float64, generator=generator)


def check(gate: Gate, given: list[Tensor]) -> None:
    """Results and gradients are those in fp64, rounded from fp32 once.

    Each number by itself, beside 1e-6 of its tensor's largest. Around a product, whose factors are
    rounded too, 4 times the rounding of the largest.
    """
    found = []
    for backend, device, wide in (("torch", "cpu", True), ("triton", DEVICE, False)):
        leaves = [x.detach().to(device) for x in given]
        leaves = [(x.double() if wide else x).requires_grad_() for x in leaves]
        y = gate(*leaves, backend=backend)
        ys = list(y) if isinstance(y, tuple) else [y]
        dys = [noise(*one.shape, seed=9 + i).float() for i, one in enumerate(ys)]
        dys = [dy.to(device, one.dtype) for dy, one in zip(dys, ys, strict=True)]
        found.append([*ys, *torch.autograd.grad(ys, leaves, dys)])
    for i, (want, got) in enumerate(zip(*found, strict=True)):
        first = given[0].dtype if gate in (gated, gated_linear) else torch.float32
        assert got.shape == want.shape
        assert got.dtype == (first if i < len(ys) else given[i - len(ys)].dtype)
        assert (got.isnan().cpu() == want.isnan()).all()
        want = want.nan_to_num(nan=0.0)
        off = (got.double().cpu().nan_to_num(nan=0.0) - want).abs()
        rounding = torch.finfo(got.dtype).eps
        least = 4 * rounding if gate is gated_linear else 1e-6
        assert (off <= (rounding + 1e-5) * want.abs() + least * want.abs().max()).all()


def apart(x: Tensor) -> Tensor:
    """Return the same numbers, stored within wider tokens."""
    wider = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
    wider[..., 2:-1] = x
    return wider[..., 2:-1]


@pytest.mark.parametrize("factor", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_decay(width: int, dtype: torch.dtype, factor: bool) -> None:
    """Over all that softplus has: far below 0, where it is small, and beyond 20."""
    x = apart(noise(2, 13, width, size=12.0).to(dtype))
    weights = [noise(width, seed=1).float(), noise(width, seed=2).float()]
    check(lambda *leaves, backend: decay(*leaves, factor, backend), [x, *weights])


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_steps(width: int, dtype: torch.dtype, softplus: bool) -> None:
    """With rates at their floor, exactly 0, and NaN; beside two ranks of three groups of B and C.

    The state is as wide as there are heads. Gradients of channels that are read within wider tokens
    lie side by side.
    """
    dt, a = (noise(2, 13, width, seed=i, size=4.0).to(dtype) for i in range(2))
    a[0, 0, :3] = torch.tensor([0.0, -1e4, float("nan")])
    both, bc = (apart(dt), apart(a)), noise(2, 13, 12 * width, seed=3).to(dtype)
    weights = [noise(width, seed=i).float() for i in (2, 4, 5)]

    def made(*leaves: Tensor, backend: str) -> Any:
        if backend == "triton":
            return in_triton("steps", None, (2, 1e-5, torch.float32, 0.1, softplus), *leaves)
        dt, a, bias, bc, c_weight, b_weight = leaves
        b_BTRGW, c_BTRGW = bc.unflatten(-1, (2, 2, 3, width)).unbind(2)
        parts = (c_BTRGW, c_weight), (b_BTRGW, b_weight)
        normed = [rms_norm_reference(*part, 1e-5) for part in parts]
        return *normed, *steps(dt, a, bias, 0.1, softplus)

    for given in (both, (both[0], a)):  # as far apart, and not
        for channels in (bc, apart(bc)):
            check(made, [*given, weights[0], channels, *weights[1:]])


def test_a_group_that_overflows_has_no_gradient() -> None:
    """Return zeros of it and NaN as its gradient, as a row of an RMSNorm has them."""
    dt, bc = noise(1, 2, 4).float().to(DEVICE), noise(1, 2, 16).float()
    bc[0, 1, 4:8] = 1e30
    bc = bc.to(DEVICE).requires_grad_()
    weight = torch.ones(4, device=DEVICE)
    how = 1, 1e-5, torch.float32, 0.1, True
    c, b, *_ = in_triton("steps", None, how, dt, dt, weight, bc, weight, weight)
    (dbc,) = torch.autograd.grad((c.sum() + b.square().sum()), bc)
    assert not b[0, 1, 0, 1].any() and dbc[0, 1, 4:8].isnan().all()
    assert dbc.isnan().sum() == 4 and c.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_residual(width: int, dtype: torch.dtype) -> None:
    y, v = (noise(2, 13, width // 5, 5, seed=i).to(dtype) for i in range(2))
    D, g = noise(width // 5, 5, seed=2).float(), noise(2, 13, width // 5 * 5, seed=3, size=5.0)
    check(gated_residual, [y, v, D, apart(g.to(dtype))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
def test_norm_and_gate(shared: bool, width: int, dtype: torch.dtype) -> None:
    """Check one weight for all heads, and a weight for each head."""
    x, z = noise(2, 13, 3, 1, width), noise(2, 13, 3 * width, seed=1, size=5.0)
    weight = noise(width, seed=2).float() if shared else noise(3, width, seed=2).float()

    def gate(x: Tensor, z: Tensor, weight: Tensor, backend: str) -> Tensor:
        z, weight = z.unflatten(-1, (3, width)), weight.expand(3, -1)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return gated_ranks(x, z, weight, None, None, 1e-5, wide, backend)

    check(gate, [x.to(dtype), apart(z.to(dtype)), weight])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swiglu", [True, False], ids=["swiglu", "relu2"])
@pytest.mark.parametrize("weight", [True, False], ids=["linear", "alone"])
@pytest.mark.parametrize("halves", [True, False], ids=["halves", "apart"])
def test_gated(halves: bool, weight: bool, swiglu: bool, dtype: torch.dtype) -> None:
    """Hidden units, alone and before a product, whose results have the dtype of what is given."""
    given = [noise(2, 13, 10, seed=i).to(dtype) for i in range(1 + swiglu)]
    given = [*torch.cat([*given, *given[:1]], -1).split(10, -1)][: len(given)] if halves else given
    if not weight:
        check(gated, given)
        return
    given = [noise(6, 10, seed=5).to(dtype), *given]
    check(gated_linear, given)
    w_DF, *hidden = (x.to(DEVICE).requires_grad_() for x in given)
    grads = torch.autograd.grad(gated_linear(w_DF, *hidden, backend="triton").sum(), hidden)
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1, "halves of one tensor"


def test_no_tokens_and_one_token_of_a_decoding() -> None:
    weights = [noise(4, seed=i).float().to(DEVICE).requires_grad_() for i in range(2)]
    x = torch.zeros(2, 0, 4, device=DEVICE).requires_grad_()
    y = decay(x, *weights, True, "triton")  # type: ignore[misc]
    grads = torch.autograd.grad(y.sum(), [x, *weights])
    assert y.shape == x.shape and not any(g.any() for g in grads)
    one = noise(3, 4).float().to(DEVICE)
    by_torch, by_triton = (decay(one, *weights, True, b) for b in ("torch", "triton"))  # type: ignore[misc]
    assert torch.equal(by_torch, by_triton)
