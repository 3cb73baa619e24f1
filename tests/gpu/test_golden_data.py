"""Blocks against stored upstream results, with all tensors on a GPU; fp64, fp32 and bf16.

The same checks as tests/golden, at the same tolerances: products of a GPU sum in another order, not
in fewer bits (TF32 is off by default). A CPU runs one file of each kind to show that the checks
keep to the device that they are given. In bf16 it is every backend's own kernels, as they are
chosen by name; tests/test_golden_bf16.py is the same table on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.golden.check_gated_delta import moved_by_rounding
from tests.golden.harness import GoldenFile
from tests.golden.narrow import Case, cases
from tests.golden.test_golden import owner
from tests.gpu.devices import NEEDS_CUDA

FILES = sorted((Path(__file__).parents[1] / "golden/data").glob("*.safetensors"))
# What has a process group or an optimizer of its own is no matter of a block on a device.
BLOCKS = [
    path for path in FILES if not path.name.startswith(("muon", "compact")) and owner(path.name)
]
BLOCKS = [path for path in BLOCKS if "_cp" not in path.name]
FIRST = {path.name.split("_")[0]: path for path in reversed(BLOCKS)}
CASES = [
    *(pytest.param(path, "cpu", id=f"cpu-{path.stem}") for path in FIRST.values()),
    *(pytest.param(path, "cuda", id=f"cuda-{path.stem}", marks=NEEDS_CUDA) for path in BLOCKS),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("path", "device"), CASES)
def test_golden_data(path: Path, device: str, dtype: torch.dtype) -> None:
    family = owner(path.name)
    assert family is not None
    golden = GoldenFile(path, dtype, torch.device(device))
    with torch.device(device):  # weights and constants that a check makes itself
        family.check(golden)
    golden.finish()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_golden_data_in_bf16(case: Case) -> None:
    device = torch.device("cuda", 0)
    if missing := case.missing(device):
        pytest.skip(f"not installed: {missing}")
    off = case.run(device)
    assert off and max(off.values()) <= 1, {name: x for name, x in off.items() if not x <= 1}


def test_rounding_is_measured_where_its_file_is() -> None:
    """Whatever device a check makes tensors on: here one on which no number could be compared."""
    golden = GoldenFile(next(p for p in BLOCKS if "layer" in p.name), torch.float32)
    here = moved_by_rounding(golden, "grad_neg.x")
    with torch.device("meta"):
        assert 0 < moved_by_rounding(golden, "grad_neg.x") == here
