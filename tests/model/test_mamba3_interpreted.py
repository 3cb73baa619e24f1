"""mamba-ssm's own SISO kernels, called as the model calls them, against references: on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp.memory.forms.activation_mamba3 import Mamba3Sizes, by_kernel, mamba3
from megacpp.memory.forms.activation_share import Kept, Share
from megacpp.memory.forms.working_mamba3_kernel import backward, forward
from megacpp.model.regions import NOTHING
from tests.model.mamba3_cases import alone
from tests.model.mamba3_interpreted import CHUNK, DIM, DOCS, LAYER, TOKENS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "golden" / "data"
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
    files = [str(DATA / f"{name}.safetensors") for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.mamba3_interpreted", *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_outputs_states_and_gradients(found: dict[str, Any]) -> None:
    """fp32: 2e-6 for outputs and states, 1e-5 for gradients, as for our own forms."""
    assert set(found["errors"]) >= {f"{name}.safetensors" for name in FILES}
    for case, errors in found["errors"].items():
        assert "out" in errors and len(errors) > 10, case
        for name, error in errors.items():
            limit = 2e-6 if name.startswith(("out", "final")) else 1e-5
            assert error <= limit, f"{case}: {name} is off by {error:.1e}"


@pytest.mark.parametrize(("dtype", "narrow"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("case", ["rows", "packed", "norm"])
def test_what_is_kept_for_backward_is_what_the_estimate_counts(
    found: dict[str, Any], case: str, dtype: str, narrow: int
) -> None:
    """To the byte."""
    own = replace(share(case), parallel=True, compute=narrow)  # joined weights are counted with it
    sizes = Mamba3Sizes.of(own, again=False)
    chunks = len(DOCS.cu_seqlens) - 1 + 2 * TOKENS // CHUNK if case == "packed" else 4
    expected = total(mamba3(own, NOTHING)) - total(by_kernel(sizes, sizes.kernel_chunks))
    assert found["kept"][dtype][case] == expected + total(by_kernel(sizes, chunks))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", ["rows", "packed", "norm"])
def test_the_fullest_moment_is_estimated_from_above(
    found: dict[str, Any], case: str, direction: str
) -> None:
    """Above by the chunks that documents may add, and by contiguous copies not all alive at once:
    of the few tokens here, up to a quarter. Joined weights are the estimate's with all weights."""
    form = {"forward": forward, "backward": backward}[direction]
    own = replace(share(case), most=case == "packed")  # the number of documents is data
    joined = total(k for k in mamba3(replace(own, parallel=True), NOTHING) if k[0] == "weights")
    estimated = joined + max(moment.bytes for moment in form(own, NOTHING))
    assert 1.0 <= estimated / found["alive"][case][direction] < 1.25


def share(case: str) -> Share:
    mamba = replace(LAYER, out_norm=True, a_activation="softplus") if case == "norm" else LAYER
    return alone(mamba, DIM, TOKENS, "mamba_ssm")


def total(kept: Iterable[Kept]) -> int:
    return sum(numbers * each for _, numbers, each in kept)
