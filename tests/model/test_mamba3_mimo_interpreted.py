"""mamba-ssm's own MIMO kernels, called as the model calls them, against references: on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.in_child import interpreted

DATA = Path(__file__).parents[1] / "golden/data"
GOLDEN = tuple(
    f"mamba3_mimo_{name}.safetensors" for name in ("core", "rope1", "varlen", "fusednorm")
)
RANDOM = ("rows", "rows, no gate, groups", "packed", "packed, continued")

missing = [n for n in ("mamba_ssm", "triton", "tilelang") if importlib.util.find_spec(n) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (make kernels)"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """One run of tests/model/mamba3_mimo_interpreted.py."""
    files = [DATA / name for name in GOLDEN]
    return json.loads(interpreted("tests.model.mamba3_mimo_interpreted", *files)[-1])


def check(errors: dict[str, float], output: float, gradient: float) -> None:
    assert "out" in errors and len(errors) >= 13
    for name, error in errors.items():
        limit = output if name == "out" else gradient
        assert error <= limit, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("case", [*GOLDEN, *RANDOM])
def test_the_formula(found: dict[str, Any], case: str) -> None:
    """fp32 in place of bf16: 2e-6 for outputs, 1e-5 for gradients, as for our own forms."""
    check(found["errors"]["fp32"][case], 2e-6, 1e-5)


@pytest.mark.parametrize("case", GOLDEN)
def test_the_rounding_on_golden_data(found: dict[str, Any], case: str) -> None:
    """As it is, rounded to bf16 wherever the kernels do: the tolerances that the data states.

    Inputs are rounded as well, which the data's are not.
    """
    check(found["errors"]["bf16"][case], 1e-2, 3e-2)


@pytest.mark.parametrize("case", RANDOM)
def test_the_rounding_on_random_scans(found: dict[str, Any], case: str) -> None:
    """On inputs that are bf16. A number is rounded about ten times between an input and the output
    (bias, turn, scale, masked scores, state, gate, sum over ranks), by up to 2^-9 of it: 2 %.
    Gradients go through as many once more: 4 %.
    """
    check(found["errors"]["bf16"][case], 10 * 2.0**-9, 20 * 2.0**-9)


@pytest.mark.parametrize("case", ["rows", "packed", "norm"])
def test_what_is_kept_for_backward_is_what_traces_count(found: dict[str, Any], case: str) -> None:
    """To the byte, in fp32."""
    memory = found["memory"]
    assert memory["kernel"]["fp32"][case] == memory["stand-in"]["fp32"][case]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", ["rows", "packed", "norm"])
def test_the_fullest_moment_is_that_of_traces(
    found: dict[str, Any], case: str, direction: str
) -> None:
    """To 2 %: of so few tokens, weights of heads that are rounded for a while weigh 1 %."""
    memory = found["memory"]
    real, traced = (memory[by]["alive"][case][direction] for by in ("kernel", "stand-in"))
    assert abs(traced / real - 1) < 0.02
