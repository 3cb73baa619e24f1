"""Triton's interpreter as tests use it: its bf16 is torch's, bit by bit."""

from __future__ import annotations

import pytest

from tests.model.in_child import run_cases

CASES = "tests/model/triton_interpreter_cases.py"


def test_in_a_process_of_its_own() -> None:
    pytest.importorskip("triton")
    run_cases(CASES, interpreted=True)
