"""Routed experts by a backend, from tokens to their outputs and all gradients.

As a program (`TRITON_INTERPRET=1`, before Triton is imported): every case by `triton` on a CPU in
fp32 and bf16, against `torch` in fp64 on the same numbers; a JSON list of [dtype, case, largest
difference over largest value] a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp.kernels.experts.copies import gather_rows, spread_rows
from megacpp.kernels.experts.mlp import into_experts, out_of_experts
from megacpp.kernels.experts.reference import experts_reference
from megacpp.kernels.experts.rows import (
    Groups,
    group_rows,
    sum_rows,
    weigh_slots,
)
from megacpp.kernels.experts.without_slot import group_rows_to_capacity
from tests.differences import largest, relative


@dataclass(frozen=True)
class Case:
    """T tokens, D model, I hidden, E experts, K of a token; how they are grouped and weighed."""

    name: str
    tokens: int = 37
    dim: int = 24
    hidden: int = 40
    experts: int = 5
    top_k: int = 3
    grouped: str = "padded"  # padded, nulls, capacity
    gated: bool = True
    at_source: bool = False  # rows come back without their weights, as from other ranks
    plus: bool = False  # something is added to the sums, which are rounded


CASES = (
    Case("padded"),
    Case("nulls", grouped="nulls"),
    Case("capacity", grouped="capacity"),
    Case("relu2", gated=False),
    Case("plus", grouped="nulls", plus=True),
    Case("at source", at_source=True),
    Case("at source, capacity", at_source=True, grouped="capacity"),
    Case("wider than a block", tokens=9, dim=1100, hidden=1500),
    Case("one token", tokens=1, experts=2, top_k=1),
)


def run(
    case: Case, backend: str, dtype: torch.dtype, device: str = "cpu", wide: bool = False
) -> list[Tensor]:
    """Outputs and gradients of tokens, weights of the copies and of the experts.

    Args:
        dtype: of tokens and experts; copies are weighed in fp32, or in fp64 with tokens in fp64.
        wide: compute in fp64 on the numbers that `dtype` holds.
    """
    generator = torch.Generator().manual_seed(1)
    T, D, K, E = case.tokens, case.dim, case.top_k, case.experts

    def made(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        x = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(to)
        return (x.double() if wide else x).to(device).requires_grad_()

    chosen = [torch.randperm(E, generator=generator)[:K] for _ in range(T)]
    groups = grouped(case, torch.stack(chosen).to(device)).by(
        "torch" if backend == "reference" else backend
    )
    weigh = dtype if dtype == torch.float64 else torch.float32
    x, weights = made(T, D), made(T, K, to=weigh)
    into = [made(E, case.hidden, D, scale=0.2) for _ in range(1 + case.gated)]
    w2 = made(E, D, case.hidden, scale=0.2)
    d_y = made(T, D, to=torch.bfloat16).to(weights.dtype).detach()
    if case.at_source:
        y = gather_rows(spread_rows(x, groups).square(), weights, groups)
        return [y.detach(), *torch.autograd.grad(y, (x, weights), d_y)]
    if backend == "reference":
        rows = experts_reference(x, groups, weigh_slots(weights, groups), *into, w2)
    else:
        *hidden, _ = into_experts(x, groups, *into)
        rows = out_of_experts(tuple(hidden), w2, weights, groups)
    given = x, weights, *into, w2
    if not case.plus:
        y = sum_rows(rows, groups)
        return [y.detach(), *torch.autograd.grad(y, given, d_y)]
    plus = made(T, D)
    y = sum_rows(rows, groups, plus, plus.dtype)
    return [y.detach(), *torch.autograd.grad(y, (*given, plus), d_y.to(y.dtype))]


def grouped(case: Case, chosen_TK: Tensor) -> Groups:
    if case.grouped == "capacity":
        return group_rows_to_capacity(chosen_TK, case.experts, 15)
    if case.grouped == "nulls":
        chosen_TK[::3, -1] = case.experts
        return group_rows(chosen_TK, case.experts, 16, expected=case.top_k - 1)
    return group_rows(chosen_TK, case.experts, 16)


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference over the largest value, of the worst result."""
    return largest(relative(a, b) for a, b in zip(got, want, strict=True))


if __name__ == "__main__":
    from tests.model.triton_interpreter import mend  # only where Triton is

    mend()
    for dtype in (torch.float32, torch.bfloat16):
        for one in CASES:
            error = worst(run(one, "triton", dtype), run(one, "torch", dtype, wide=True))
            print(json.dumps([str(dtype), one.name, error]))
