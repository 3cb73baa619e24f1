"""A scheduler that wants its machines back says so with SIGTERM; the run saves and leaves."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Remembers a SIGTERM until the step that it came in is over.

    Ranks hear of it at different moments, some not at all: they agree with the numbers that travel
    with the gradient norm (`AccumulationBoundary`), and all leave after the same step. Further
    signals change nothing: a scheduler may tell every process, and torchrun then tells its ranks
    once more. It kills after 30 seconds what is still there.
    """

    def __init__(self) -> None:
        self.heard = False
        signal.signal(signal.SIGTERM, self._hear)

    def __call__(self) -> bool:
        return self.heard

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
