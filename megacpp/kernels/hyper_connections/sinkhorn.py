"""Sinkhorn iterations, which make any matrix nearly doubly stochastic.

Rows and columns are divided by their sums, in turn. Published hyper-connections iterate in three
ways that aren't equal to the bit. All start from exp(logits) and run `iterations` pairs of steps;
the last one decides what sums to one exactly:

    paper         columns, rows                                          rows
    megatron      rows, columns; sums of at least 1e-6                   columns
    deepseek_v4   softmax of rows + 1e-6, columns, then rows, columns;
                  1e-6 is added to every sum                             columns, but for 1e-6

The backward differentiates these very iterations, not the matrix that they tend to. It saves none
of them: it runs them again, keeps the divisor of each step, and goes back by multiplying.

Legend: S tokens, n streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from megacpp.torch_extras import once_differentiable

Ordering = Literal["paper", "deepseek_v4", "megatron"]
EPS = 1e-6  # of the published codes
ROWS, COLUMNS = -1, -2  # the dim that a sum of a row, or of a column, runs over
TINY = 2.0**-100  # far below any sum, and 1 / TINY far below the largest number of fp32


def sinkhorn(logits_Snn: Tensor, ordering: Ordering, iterations: int) -> Tensor:
    """Matrices that are nearly doubly stochastic (arXiv 2512.24880, section 4.2), of fp32 or wider.

    Args:
        logits_Snn: of fp32 or fp64, leading dims as they like.
    """
    if torch.compiler.is_compiling():
        return sinkhorn_reference(logits_Snn, ordering, iterations)
    return _Sinkhorn.apply(logits_Snn, ordering, iterations)  # type: ignore[return-value]


def sinkhorn_reference(logits_Snn: Tensor, ordering: Ordering, iterations: int) -> Tensor:
    """Return `sinkhorn` by operators that autograd can follow: the definition."""
    m_Snn = _start(logits_Snn, ordering)
    for dim in _steps(ordering, iterations):
        m_Snn = m_Snn / _divisor(m_Snn.sum(dim, keepdim=True), ordering)
    return m_Snn


def sinkhorn_gradient(
    logits_Snn: Tensor, dm_Snn: Tensor, ordering: Ordering, iterations: int
) -> Tensor:
    """Return the gradient of the logits from that of the matrices.

    Args:
        logits_Snn: logits.
        dm_Snn: gradient of the matrices.
        ordering: of the steps.
        iterations: pairs of steps.
    """
    start_Snn = m_Snn = _start(logits_Snn, ordering)
    divisors = []
    for dim in _steps(ordering, iterations):
        divisors.append(_divisor(m_Snn.sum(dim, keepdim=True), ordering))
        m_Snn = m_Snn / divisors[-1]
    least = _least(ordering)
    for dim in reversed(list(_steps(ordering, iterations))):
        divisor = divisors.pop()
        inner = (dm_Snn * m_Snn).sum(dim, keepdim=True)
        if least:
            inner = torch.where(divisor > least, inner, 0.0)  # else it was a constant
        dm_Snn = (dm_Snn - inner) / divisor
        m_Snn = m_Snn * divisor
    if ordering != "deepseek_v4":  # the shift of the logits cancels in the first division
        return dm_Snn * start_Snn
    p_Snn = start_Snn - EPS
    return p_Snn * (dm_Snn - (dm_Snn * p_Snn).sum(ROWS, keepdim=True))


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Snn: Tensor, ordering: Ordering, iterations: int) -> Tensor:
        ctx.save_for_backward(logits_Snn)
        ctx.how = ordering, iterations
        return sinkhorn_reference(logits_Snn, ordering, iterations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dm_Snn: Tensor) -> tuple[Tensor, None, None]:
        (logits_Snn,) = ctx.saved_tensors
        return sinkhorn_gradient(logits_Snn, dm_Snn, *ctx.how), None, None


def _start(logits_Snn: Tensor, ordering: Ordering) -> Tensor:
    """Return positive matrices; the largest entry of each first sum is one: no overflow."""
    if ordering == "deepseek_v4":
        return torch.softmax(logits_Snn, ROWS) + EPS
    dim = COLUMNS if ordering == "paper" else ROWS
    return torch.exp(logits_Snn - logits_Snn.detach().amax(dim, keepdim=True))


def _steps(ordering: Ordering, iterations: int) -> Iterator[int]:
    """Yield the dim that is summed over in each step."""
    for number in range(iterations):
        if ordering == "paper":
            yield from (COLUMNS, ROWS)
        elif ordering == "deepseek_v4" and number == 0:
            yield COLUMNS
        else:
            yield from (ROWS, COLUMNS)


def _divisor(sums: Tensor, ordering: Ordering) -> Tensor:
    least = _least(ordering)
    return sums.clamp(min=least) if least else sums + EPS


def _least(ordering: Ordering) -> float:
    """Least sum that counts: of the paper's order one that keeps zeros from dividing zeros."""
    return {"paper": TINY, "megatron": EPS, "deepseek_v4": 0.0}[ordering]
