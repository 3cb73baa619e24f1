"""Backends of the routed experts: the definition, torch's products, Triton between them."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from megacpp.kernels.experts.rows import Groups, rows_of_slots, sum_of_slots
from tests.model.expert_backend_cases import CASES, Case, run, worst
from tests.model.in_child import interpreted

cases = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@cases
def test_torch_is_the_definition(case: Case) -> None:
    """Two formulas of one sum in fp64."""
    if case.at_source:
        pytest.skip("no product")
    got, want = (run(case, backend, torch.float64) for backend in ("torch", "reference"))
    assert worst(got, want) < 1e-12


# Against fp64 on the same numbers. fp32: sums of at most 1500 products. bf16: products of rounded
# factors (2^-9 each), hidden units rounded once, outputs of experts once: four roundings of 2^-9 in
# a row stay below 2^-6.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_triton_is_torch_in_the_interpreter() -> None:
    """Forward and backward."""
    found = [json.loads(line) for line in interpreted("tests.model.expert_backend_cases")]
    assert {(dtype, name) for dtype, name, _ in found} == {
        (str(dtype), case.name) for dtype in LIMITS for case in CASES
    }
    for dtype, limit in LIMITS.items():
        errors = {name: error for of, name, error in found if of == str(dtype)}
        assert max(errors.values()) < limit, (dtype, errors)


def test_what_has_no_slot_is_not_read() -> None:
    """Rows of nobody may be no numbers; they are in no sum, by either backend."""
    rows_SD = torch.tensor([[float("nan")], [3.0]])
    slot_KT, kept_KT = torch.tensor([[1, 0]]), torch.tensor([[True, False]])
    groups = Groups(slot_KT, torch.tensor([0, 0]), None, kept_KT)
    assert sum_of_slots(rows_SD, groups).tolist() == [[3.0], [0.0]]
    assert rows_of_slots(torch.tensor([[2.0]]), groups, torch.float32).tolist() == [[2.0], [2.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@cases
@pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "bf16"])
def test_triton_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    """Against fp64 on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    got = [x.cpu() for x in run(case, "triton", dtype, "cuda")]
    want = run(case, "torch", dtype, wide=True)
    assert worst(got, want) < LIMITS[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_repeats_exactly_on_a_gpu() -> None:
    first, again = (run(CASES[1], "triton", torch.bfloat16, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
