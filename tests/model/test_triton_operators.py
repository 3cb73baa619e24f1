"""Operators of our own as compilers want them, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.model.in_child import run_cases


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases("tests/model/triton_operator_cases.py", interpreted=True)
