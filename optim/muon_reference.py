"""Muon on one whole matrix, by its definition: what the fast and sharded forms must equal.

Legend: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.newton_schulz import (
    EPS,
    POLAR_EXPRESS_SAFETY,
    Coefficients,
    Scale,
    coefficient_rows,
    iteration_dtype,
    update_scale,
)


def muon_update(
    grad_RC: Tensor,
    momentum_RC: Tensor,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    scale: Scale = "spectral",
    coefficients: Coefficients = "quintic",
) -> Tensor:
    """Return the update of one matrix, `[R, C]`, before the learning rate.

    `momentum_RC` becomes momentum * momentum_RC + (1 - momentum) * grad_RC in place, computed in
    the gradient's dtype and rounded to its own.

    Args:
        grad_RC: gradient.
        momentum_RC: momentum, updated in place.
        momentum: decay of the momentum.
        nesterov: orthogonalise the lookahead of the momentum instead of the momentum.
        steps: Newton-Schulz steps.
        scale: rule of `update_scale`.
        coefficients: Newton-Schulz coefficients.
    """
    wide_RC = momentum_RC.to(grad_RC.dtype).lerp(grad_RC, 1 - momentum)
    wide_RC = momentum_RC.copy_(wide_RC).to(grad_RC.dtype)
    u_RC = wide_RC.lerp(grad_RC, 1 - momentum) if nesterov else wide_RC
    o_RC = newton_schulz_plain(u_RC, steps, coefficients=coefficients)
    return o_RC.to(grad_RC.dtype) * update_scale(scale, *grad_RC.shape)


def newton_schulz_plain(
    g_RC: Tensor,
    steps: int = 5,
    dtype: torch.dtype | None = None,
    coefficients: Coefficients = "quintic",
) -> Tensor:
    """Orthogonalise one matrix `[R, C]` after the definition.

    Args:
        g_RC: matrix.
        steps: number of iterations.
        dtype: dtype of the iteration and of the result; see `iteration_dtype` for the default.
        coefficients: source of a, b, c.
    """
    x = g_RC.to(dtype or iteration_dtype(g_RC))
    x = x.mT if g_RC.shape[0] > g_RC.shape[1] else x
    x = x / (x.norm() * (POLAR_EXPRESS_SAFETY if coefficients == "polar_express" else 1) + EPS)
    for a, b, c in coefficient_rows(coefficients, steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if g_RC.shape[0] > g_RC.shape[1] else x
