"""Newton-Schulz: the fast form against the definition, and what it may not depend on."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from optim.muon_reference import newton_schulz_plain
from optim.newton_schulz import (
    Coefficients,
    coefficient_rows,
    newton_schulz,
    newton_schulz_flops,
    update_scale,
)

SHAPES = [(1, 1), (1, 9), (9, 1), (4, 4), (3, 8), (8, 3), (40, 24), (24, 40), (130, 70), (1, 9000)]
SHAPES += [(280, 240)]  # large enough to be transposed alone
# Sides where libraries change over from one kernel to another, odd ones, and several to a call.
BATCHED = [(16, 64), (15, 33), (9, 64), (7, 77), (11, 22), (8, 56), (17, 34), (37, 74), (93, 335)]
NAMES: tuple[Coefficients, ...] = get_args(Coefficients)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def matrices(count: int, rows: int, cols: int, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(rows * 100 + cols)
    return torch.randn(count, rows, cols, generator=g, dtype=torch.float64).to(dtype)


def singular_values(values: Tensor, steps: int, name: Coefficients) -> Tensor:
    """Run the recurrence on numbers."""
    for a, b, c in coefficient_rows(name, steps):
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(shape: tuple[int, int], name: Coefficients) -> None:
    g_KRC = matrices(3, *shape)
    before = g_KRC.clone()
    out_KRC = newton_schulz(g_KRC, coefficients=name)
    assert torch.equal(g_KRC, before), "the argument was written to"
    for g_RC, out_RC in zip(g_KRC, out_KRC, strict=True):
        assert (out_RC - newton_schulz_plain(g_RC, coefficients=name)).abs().max() < 1e-12


@pytest.mark.parametrize("steps", [1, 5, 8])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_polynomial_of_singular_values(name: Coefficients, steps: int) -> None:
    """Compare with an independent formula: U p(p(...p(s / ‖s‖))) Vᵀ."""
    g_RC = matrices(1, 12, 7)[0]
    u_RS, s_S, v_SC = torch.linalg.svd(g_RC, full_matrices=False)
    s_S = s_S / (s_S.norm() * (1.02 if name == "polar_express" else 1) + 1e-7)
    s_S = singular_values(s_S, steps, name)
    assert (newton_schulz(g_RC, steps, coefficients=name) - u_RS * s_S @ v_SC).abs().max() < 1e-12
    assert steps == 1 or (s_S.min() > 0.6 and s_S.max() < 1.25)


def test_polar_express_comes_closer_to_one() -> None:
    """For singular values from 1e-3 to 1: after five steps, and with every step after them."""
    values = torch.logspace(-3, 0, 5000, dtype=torch.float64)

    def distances(name: Coefficients, steps: int) -> Tensor:
        length = 1.02 if name == "polar_express" else 1
        return (singular_values(values / length, steps, name) - 1).abs()

    ours, quintic = distances("polar_express", 5), distances("quintic", 5)
    assert ours.max() < 0.16 and quintic.max() > 0.5
    assert ours.mean() < 0.5 * quintic.mean()
    worst = [distances("polar_express", steps).max().item() for steps in range(5, 9)]
    assert worst == sorted(worst, reverse=True)
    assert worst[1] < 0.01 and worst[3] < 1e-12
    assert distances("quintic", 8).max() > 0.3  # more steps of these don't help


def test_steps_beyond_the_table_repeat_its_last_row() -> None:
    table = coefficient_rows("polar_express", 9)
    assert len(table) == 9 and table[6:] == [table[5]] * 3 and table[4] != table[5]
    assert len(set(coefficient_rows("quintic", 7))) == 1
    assert sum(table[-1]) == 1  # one is a fixed point


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_error_to_the_same_recurrence_in_fp64(
    dtype: torch.dtype, limit: float, name: Coefficients
) -> None:
    """Relative, Frobenius. bf16 has 2^-9 a rounding, and 15 products go through it."""
    for shape in ((64, 256), (96, 96), (300, 16)):
        g_RC = matrices(1, *shape)[0].float()
        want = newton_schulz(g_RC.double(), coefficients=name)
        got = newton_schulz(g_RC, dtype=dtype, coefficients=name)
        assert got.dtype == dtype
        assert (got.double() - want).norm() < limit * want.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_matrices_of_a_batch_do_not_matter(dtype: torch.dtype) -> None:
    for shape in SHAPES + BATCHED:
        g_KRC = matrices(11, *shape, dtype)
        together = newton_schulz(g_KRC, dtype=dtype)
        for k in range(0, 11, 2):
            assert torch.equal(newton_schulz(g_KRC[k], dtype=dtype), together[k]), shape
            some = newton_schulz(g_KRC[k : k + 3], dtype=dtype)
            assert torch.equal(some, together[k : k + 3]), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nor_with_threads(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for shape in ((4, 22), (37, 74)):
            g_KRC = matrices(11, *shape, dtype)
            together = newton_schulz(g_KRC, dtype=dtype)
            assert torch.equal(newton_schulz(g_KRC[3], dtype=dtype), together[3]), shape
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transpose_is_solved_alike(dtype: torch.dtype) -> None:
    """Whether a tall matrix lies in rows or in columns changes no bit: the operand is copied."""
    for shape in ((5, 12), (16, 120), (70, 130)):
        g_KRC = matrices(3, *shape, dtype)
        want = newton_schulz(g_KRC, dtype=dtype)
        assert torch.equal(newton_schulz(g_KRC.mT, dtype=dtype).mT, want)
        assert torch.equal(newton_schulz(g_KRC.mT.contiguous(), dtype=dtype).mT, want)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_each_matrix_for_itself(name: Coefficients) -> None:
    for dtype in (torch.float64, torch.float32):
        for shape in ((3, 3, 5), (3, 5, 3), (4, 6, 6), (3, 130, 70), (2, 300, 900), (5, 1, 4)):
            stack = matrices(*shape, dtype)
            outs = newton_schulz(stack, 6, coefficients=name)
            for x, out in zip(stack.split(1), outs.split(1), strict=True):
                assert torch.equal(out, newton_schulz(x, 6, coefficients=name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_argument_is_neither_changed_nor_kept(dtype: torch.dtype) -> None:
    """Also where nothing needs converting: a momentum of the iteration's own dtype."""
    for shape in ((2, 4, 4), (2, 9, 4), (1, 1, 8)):
        g = matrices(*shape, dtype)
        before = g.clone()
        out = newton_schulz(g, dtype=dtype)
        assert torch.equal(g, before)
        assert out.untyped_storage().data_ptr() != g.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [-100, -20, 0, 30, 120])
def test_any_size_of_gradient_is_safe(power: int, dtype: torch.dtype, name: Coefficients) -> None:
    """Same direction, any length. With entries above 2^-20 only eps tells lengths apart:

    1e-7 relative to a norm near 1, so nothing at fp32. Below, a norm is up to 10 % too long, which
    the five steps forget where the polynomial is flat.
    """
    g_KRC = matrices(3, 16, 24, torch.float32)
    g_KRC = g_KRC / g_KRC.norm(dim=(1, 2), keepdim=True)
    out_KRC = newton_schulz(g_KRC * 2.0**power, dtype=dtype, coefficients=name)
    want_KRC = newton_schulz(g_KRC, dtype=dtype, coefficients=name)
    assert out_KRC.isfinite().all()
    if power >= 0:
        assert (out_KRC - want_KRC).abs().max() < (2e-5 if dtype == torch.float32 else 0.06)
    values = torch.linalg.svdvals(out_KRC.float())
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize("name", NAMES)
def test_zero_stays_zero_beside_others(name: Coefficients) -> None:
    for dtype in DTYPES:
        g_KRC = matrices(3, 6, 4, dtype)
        g_KRC[1] = 0
        out_KRC = newton_schulz(g_KRC, dtype=dtype, coefficients=name)
        assert not out_KRC[1].count_nonzero() and out_KRC.isfinite().all()
        assert torch.equal(out_KRC[2], newton_schulz(g_KRC[2], dtype=dtype, coefficients=name))


def test_scales_by_hand() -> None:
    assert update_scale("spectral", 400, 100) == 2.0
    assert update_scale("spectral", 100, 400) == 1.0
    assert update_scale("rms", 100, 400) == pytest.approx(0.2 * 20)
    with pytest.raises(AssertionError):
        update_scale("keller", 100, 400)  # type: ignore[arg-type]
    assert newton_schulz_flops(2, 3, steps=1) == 2 * (2 * 2 * 2 * 3) + 2 * 2 * 2 * 2
