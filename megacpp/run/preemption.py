"""Preemption: after SIGTERM the run saves a checkpoint and exits."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Flag that records a SIGTERM until the current step is over.

    Ranks receive the signal at different moments, some not at all. They agree by a number in the
    all-reduce of the gradient norm (`AccumulationBoundary`), and all exit after the same step.
    Further signals are ignored: a scheduler may signal every process, and torchrun then signals its
    ranks once more. torchrun kills remaining ranks after 30 seconds.
    """

    def __init__(self) -> None:
        self.heard = False
        signal.signal(signal.SIGTERM, self._hear)

    def __call__(self) -> bool:
        """Return whether the signal has arrived."""
        return self.heard

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
