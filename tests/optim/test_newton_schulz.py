"""Newton-Schulz: the fast form against the definition, and what it may not depend on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optim.newton_schulz import (
    COEFFICIENTS,
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_plain,
    orthogonalise,
    update_scale,
)

SHAPES = [(1, 1), (1, 9), (9, 1), (4, 4), (3, 8), (8, 3), (40, 24), (24, 40), (130, 70), (1, 9000)]


def matrices(count: int, rows: int, cols: int, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(rows * 100 + cols)
    return torch.randn(count, rows, cols, generator=g, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(shape: tuple[int, int]) -> None:
    g_KRC = matrices(3, *shape)
    before = g_KRC.clone()
    out_KRC = newton_schulz(g_KRC)
    assert torch.equal(g_KRC, before), "the argument was written to"
    for g_RC, out_RC in zip(g_KRC, out_KRC, strict=True):
        assert (out_RC - newton_schulz_plain(g_RC)).abs().max() < 1e-12


def test_equals_the_polynomial_of_singular_values() -> None:
    """An independent formula: U p(p(...p(s / ‖s‖))) Vᵀ."""
    a, b, c = COEFFICIENTS
    g_RC = matrices(1, 12, 7)[0]
    u_RS, s_S, v_SC = torch.linalg.svd(g_RC, full_matrices=False)
    s_S = s_S / (s_S.norm() + 1e-7)
    for _ in range(5):
        s_S = a * s_S + b * s_S**3 + c * s_S**5
    assert (newton_schulz(g_RC) - u_RS * s_S @ v_SC).abs().max() < 1e-12
    assert s_S.min() > 0.6 and s_S.max() < 1.25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_matrices_of_a_batch_do_not_matter(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    g_KRC = matrices(7, *shape, dtype)
    together = newton_schulz(g_KRC, dtype=dtype)
    for k in range(7):
        assert torch.equal(newton_schulz(g_KRC[k], dtype=dtype), together[k])
        assert torch.equal(newton_schulz(g_KRC[k : k + 3], dtype=dtype), together[k : k + 3])


def test_orthogonalise_is_each_stack_for_itself() -> None:
    shapes = [(2, 3, 5), (1, 5, 3), (4, 6, 6), (3, 3, 5), (2, 130, 70), (1, 70, 130), (5, 1, 4)]
    stacks = [matrices(*shape) for shape in shapes]
    outs = orthogonalise(stacks)
    assert [tuple(out.shape) for out in outs] == shapes
    for stack, out in zip(stacks, outs, strict=True):
        assert torch.equal(out, newton_schulz(stack))
    assert orthogonalise([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [-100, -20, 0, 30, 120])
def test_any_size_of_gradient_is_safe(power: int, dtype: torch.dtype) -> None:
    """Same direction, any length. With entries above 2^-20 only eps tells lengths apart:

    1e-7 relative to a norm near 1, so nothing at fp32. Below, a norm is up to 10 % too long, which
    the five steps forget where the polynomial is flat.
    """
    g_KRC = matrices(3, 16, 24, torch.float32)
    g_KRC = g_KRC / g_KRC.norm(dim=(1, 2), keepdim=True)
    out_KRC = newton_schulz(g_KRC * 2.0**power, dtype=dtype)
    want_KRC = newton_schulz(g_KRC, dtype=dtype)
    assert out_KRC.isfinite().all()
    if power >= 0:
        assert (out_KRC - want_KRC).abs().max() < (2e-5 if dtype == torch.float32 else 0.06)
    values = torch.linalg.svdvals(out_KRC.float())
    assert values.min() > 0.5 and values.max() < 1.3


def test_zero_stays_zero_beside_others() -> None:
    g_KRC = matrices(3, 6, 4, torch.float32)
    g_KRC[1] = 0
    out_KRC = newton_schulz(g_KRC)
    assert not out_KRC[1].count_nonzero() and out_KRC.isfinite().all()
    assert torch.equal(out_KRC[2], newton_schulz(g_KRC[2]))


def test_scales_by_hand() -> None:
    assert update_scale("keller", 400, 100) == 2.0
    assert update_scale("keller", 100, 400) == 1.0
    assert update_scale("moonshot", 100, 400) == pytest.approx(0.2 * 20)
    assert newton_schulz_flops(2, 3, steps=1) == 2 * (2 * 2 * 2 * 3) + 2 * 2 * 2 * 2
