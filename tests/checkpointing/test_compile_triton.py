"""Compiled blocks with Triton's kernels, in a child process with Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest

from tests.model.in_child import run_cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton isn't installed"
)


def test_graphs_of_blocks_with_triton_kernels() -> None:
    run_cases("tests/checkpointing/compiled_triton_cases.py", interpreted=True)
