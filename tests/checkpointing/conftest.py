"""For tests that count what the compiler makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def no_graphs_of_others() -> Iterator[None]:
    """Dynamo as in a new process, its counters too; nothing is left for the next test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
