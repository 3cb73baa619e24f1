"""mamba-ssm's own SISO kernels, called as the model calls them, against references: on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.in_child import interpreted

DATA = Path(__file__).parents[1] / "golden/data"
FILES = (
    "mamba3_siso_core",
    "mamba3_siso_varlen_state",
    "mamba3_siso_state",
    "mamba3_siso_cp_varlen",
)

missing = [name for name in ("mamba_ssm", "triton") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (make kernels)"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """One run of tests/model/mamba3_interpreted.py."""
    files = [DATA / f"{name}.safetensors" for name in FILES]
    return json.loads(interpreted("tests.model.mamba3_interpreted", *files)[-1])


def test_outputs_states_and_gradients(found: dict[str, Any]) -> None:
    """fp32: 2e-6 for outputs and states, 1e-5 for gradients, as for our own forms."""
    assert set(found["errors"]) >= {f"{name}.safetensors" for name in FILES}
    for case, errors in found["errors"].items():
        assert "out" in errors and len(errors) > 10, case
        for name, error in errors.items():
            limit = 2e-6 if name.startswith(("out", "final")) else 1e-5
            assert error <= limit, f"{case}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", ["rows", "packed", "norm"])
def test_what_is_kept_for_backward_is_what_traces_count(
    found: dict[str, Any], case: str, dtype: str
) -> None:
    """To the byte."""
    memory = found["memory"]
    assert memory["kernel"][dtype][case] == memory["stand-in"][dtype][case]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", ["rows", "packed", "norm"])
def test_the_fullest_moment_is_that_of_traces(
    found: dict[str, Any], case: str, direction: str
) -> None:
    """To 2 %: of so few tokens, weights of heads that are rounded for a while weigh 1 %."""
    memory = found["memory"]
    real, traced = (memory[by]["alive"][case][direction] for by in ("kernel", "stand-in"))
    assert abs(traced / real - 1) < 0.02
