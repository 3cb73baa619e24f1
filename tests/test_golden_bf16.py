"""Golden data in bf16 by every backend on a CPU; on a GPU tests/gpu/test_golden_data.py."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from megacpp.kernels.mamba3.library import siso_tuners
from megacpp.kernels.selection import OPERATIONS
from tests.golden import narrow
from tests.golden.narrow import Case, cases
from tests.model.in_child import interpreted
from tests.together import Together

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def by_triton() -> Together[Case, dict[str, float]]:
    """Return the results of each case; chosen ones are one run of Triton's interpreter."""

    def make(some: list[Case]) -> dict[Case, dict[str, float]]:
        found = json.loads(interpreted("tests.golden.narrow", *(case.id for case in some))[-1])
        return {case: found[case.id] for case in some}

    return Together(__name__, [c for c in cases() if c.interpreted and not c.missing(CPU)], make)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * c.interpreted, id=c.id) for c in cases()],
)
def test_golden_data_in_bf16(case: Case, request: pytest.FixtureRequest) -> None:
    if missing := case.missing(CPU):
        pytest.skip(f"not installed: {missing}")
    off = request.getfixturevalue("by_triton")[case] if case.interpreted else case.run(CPU)
    assert off and max(off.values()) <= 1, {name: x for name, x in off.items() if not x <= 1}


def test_every_backend_is_there() -> None:
    found = {(case.operation, case.backend) for case in cases()}
    named = {name: op for name, op in OPERATIONS.items() if name != "rms_norm"}  # torch's operator
    assert found == {(name, b.name) for name, op in named.items() for b in op.backends}


@pytest.mark.skipif(find_spec("mamba_ssm") is None, reason="not installed: mamba_ssm")
def test_no_file_tunes_kernels() -> None:
    """Imitate a GPU, which a CPU can't launch; afterwards the kernels are unchanged."""
    for most in (1, 81, 1):
        with narrow.siso_untuned() if most == 1 else nullcontext():
            assert max(len(tuner.configs) for tuner in siso_tuners()) == most


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 % too much in one head of an output is more than bf16 explains."""
    scan = narrow.m2rnn_chunked

    def too_much(*given: Any, **more: Any) -> Any:
        y_BTNV, final = scan(*given, **more)
        return torch.cat([y_BTNV[:, :, :1] * 1.03, y_BTNV[:, :, 1:]], 2), final

    monkeypatch.setattr(narrow, "m2rnn_chunked", too_much)
    assert Case("m2rnn", "torch", "m2rnn_op").run(CPU)["y"] > 1
