"""Number of iterations for which one iteration of a loop stands, in a run without values.

with standing_for(14):   # the loop has 14 such iterations, and runs one
repeats()            # 14.0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_times = [1.0]


@contextmanager
def standing_for(times: float) -> Iterator[None]:
    """Have what runs inside of the context stand for as many runs; nested loops multiply."""
    before = _times[0]
    _times[0] = before * times
    try:
        yield
    finally:
        _times[0] = before


def repeats() -> float:
    """Return how many runs the one that goes on stands for."""
    return _times[0]
