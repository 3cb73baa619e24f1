"""`pytest tests/golden --golden-dir DIR`: our code against stored upstream results."""

from __future__ import annotations

import importlib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.golden.conftest import golden_files
from tests.golden.harness import GoldenFile

# What must be checked when it is there: a file matching one of these and no family is a failure.
REQUIRED = (
    *("mamba3_*", "m2rnn_*", "mla_*", "moe_*", "linear_ce*", "muon*", "compact*"),
    *("dsa_*", "mtp*", "top*", "engram*", "mhc_*", "gdn_*"),
)
FAMILIES: list[ModuleType] = [
    importlib.import_module(f"tests.golden.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("check_*.py"))
]


def owner(name: str) -> ModuleType | None:
    """The family that checks the file `name`, None if nobody knows it."""
    for family in FAMILIES:
        skipped = any(fnmatch(name, pattern) for pattern in getattr(family, "SKIP", ()))
        if not skipped and any(fnmatch(name, pattern) for pattern in family.KNOWN):
            return family
    return None


def required(name: str) -> bool:
    return any(fnmatch(name, p) for p in REQUIRED)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_path" in metafunc.fixturenames:
        files = [f for f in golden_files(metafunc.config) if owner(f.name) or required(f.name)]
        metafunc.parametrize("golden_path", files, ids=[f.stem for f in files])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_golden(golden_path: Path, dtype: torch.dtype) -> None:
    family = owner(golden_path.name)
    assert family is not None, f"{golden_path.name}: no check_*.py knows this file"
    golden = GoldenFile(golden_path, dtype)
    family.check(golden)
    golden.finish()
