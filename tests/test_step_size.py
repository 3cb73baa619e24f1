"""Our own code that a training step runs through: it may shrink, and grows for a reason only."""

from __future__ import annotations

import ast

import pytest

from bench.house import STEPS, step_path
from tests.launch import ROOT

# Files, lines in them, switches between files, as today; the aims are in bench/house.py.
MOST = {"dense": (30, 4_850, 360), "hybrid": (48, 8_450, 990)}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_through_no_more(name: str) -> None:
    path = step_path(name)
    found = len(path.files), path.lines, path.switches
    assert all(here <= most for here, most in zip(found, MOST[name], strict=True)), found
    assert "parallel/boundary.py" in path.files and "megacpp/model/hybrid.py" in path.files


def test_the_run_reads_on_two_pages() -> None:
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 130
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert len(imports) <= 20
