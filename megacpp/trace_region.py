"""Named part of a step in a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name a part of a step in a trace; without a trace it costs one check."""
    if not torch.autograd._profiler_enabled():
        yield
        return
    with torch.profiler.record_function(name):
        yield
