"""Operators of our own beside their kernels: schema, and results of tensors without values.

A compiled graph, and a trace of memory, take shape, dtype and strides of a result from the form
without values; what reads the result was made for these.

Legend: T tokens, K experts of a token, S slots, D model, I hidden, E experts, B rows, N heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megacpp.kernels.experts import fp8, grouped_mm, triton
from megacpp.kernels.experts.rows import group_rows
from megacpp.kernels.m2rnn import triton as m2rnn

T, K, D, E = 8, 2, 16, 4
B, N, KEY, CHUNK = 2, 2, 16, 4


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def columns(*shape: int) -> Tensor:
    """Return numbers whose columns lie together in memory."""
    return noise(*shape[::-1]).t()


def of_experts() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    chosen_TK = torch.stack([torch.arange(T) % E, (torch.arange(T) + 1) % E], 1)
    groups = group_rows(chosen_TK, E, 16)
    token_S, slot_TK, S = groups.token_S, groups.slot_KT.T.contiguous(), len(groups.token_S)
    counts_E = torch.as_tensor(groups.counts_E)
    weights_TK, weight_S, nothing = torch.rand(T, K), torch.rand(S), (None, None, None, None)
    copies = weights_TK, slot_TK, token_S, None
    yield "rows", triton._spread, (columns(T, D), token_S, torch.float32)
    weighed = noise(T, D), token_S, weight_S, columns(S, D)
    yield "weighed rows", triton._spread_weighed, weighed
    summed = columns(S, D), groups.slot_KT, None, weights_TK.T, noise(T, D), torch.bfloat16
    yield "sum", triton._sum_of_slots, summed
    import megacpp.kernels.experts.triton_rows
    import megacpp.kernels.experts.triton_units  # noqa: F401 - these define the operators

    ours, found = torch.ops.megacpp, noise(S, 2 * D).chunk(2, 1)
    units, units_back = ours.experts_units.default, ours.experts_units_backward.default
    yield "units of halves", units, (*found, *nothing)
    yield "units of columns", units, (columns(S, D), noise(S, D), *copies)
    halves = columns(S, D), columns(S, D), *nothing, found[0], True
    yield "units back to halves", units_back, halves
    yield "units back of columns", units_back, (*found, *copies, columns(S, D), False)
    yield "single units back", units_back, (columns(S, D), None, *copies, noise(S, D), True)
    yield "groups", ours.experts_group.default, (chosen_TK, E, 16, False)
    yield "groups of some", ours.experts_group.default, (chosen_TK.clamp(max=1), 1, 16, True)
    yield "products", grouped_mm._loop, (columns(S, D), noise(E, D, 8), counts_E, None)
    outer = columns(S, 8), columns(S, D), None, counts_E.tolist(), E
    yield "outer products", grouped_mm._outer_loop, outer
    yield "rounded", fp8._rounded_loop, (columns(S, D), counts_E, None)


def of_m2rnn() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    q = noise(B, T, 1, 3 * KEY)[..., :KEY]
    k, v, f = noise(B, T, 1, KEY), noise(B, T, N, KEY), torch.rand(B, N, T).mT
    given = q, k, v, f, 0.1 * torch.eye(KEY).repeat(N, 1, 1), None, None, None
    how = N, CHUNK, B, False, False
    _, _, *kept = m2rnn.forward(*given, *how)
    yield "M2RNN", m2rnn.forward, (*given, *how)
    back = noise(B, T, N, KEY), None, *given, kept, N, CHUNK, False, 1, 1.0
    yield "M2RNN back", m2rnn.backward, back


CASES = [pytest.param(*rest, id=name) for name, *rest in (*of_experts(), *of_m2rnn())]


@pytest.mark.parametrize(("operator", "given"), CASES)
def test_results_without_values_are_laid_out_alike(operator: Any, given: tuple[Any, ...]) -> None:
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
