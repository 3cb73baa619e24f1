"""Stragglers: ranks whose own part of a step takes far longer than that of the others.

In a step all ranks take equally long, most of them in waits for the slowest. So each rank samples
whether a collective of its own is incomplete; the rest of the time is its own work.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "stragglers.jsonl"
WINDOW = 20  # steps
TIMES = 2.0  # the median own time of the others: a straggler
SHARE = 0.6  # of the step: less can't slow the others down much
EVERY_S = 2.0  # between two comparisons


class Straggler:
    """Own time of this rank's steps, and on the first rank the comparison of all.

    Args:
        folder: folder of the run.

    Attributes:
        slow: ranks that were reported and haven't recovered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.slow = folder, set[int]()
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # own, whole seconds
        self._at: int | None = None
        self._own = self._whole = self._compared = 0.0

    def sample(self, step: int | None, passed: float, waiting: bool) -> None:
        """Count seconds of a step, in which this rank waited for others or didn't."""
        if step != self._at:
            if self._at is not None:
                self._steps.append((self._own, self._whole))
            self._at, self._own, self._whole = step, 0.0, 0.0
        self._own += 0.0 if waiting else passed
        self._whole += passed

    def figures(self) -> dict[str, float]:
        """Return this rank's median seconds of the last steps; nothing before there are enough."""
        if len(self._steps) < WINDOW:
            return {}
        own, whole = (statistics.median(column) for column in zip(*self._steps, strict=True))
        return {"own_s": own, "step_s": whole}

    def due(self) -> bool:
        """Return whether ranks should be compared now."""
        if len(self._steps) < WINDOW or time.monotonic() - self._compared < EVERY_S:
            return False
        self._compared = time.monotonic()
        return True

    def compare(self, told: Mapping[int, Mapping[str, Any]]) -> None:
        """Report ranks that have become slow, by what each has told; print a line for each."""
        own = {rank: one["own_s"] for rank, one in told.items() if "own_s" in one}
        for rank, mine in own.items():
            others = [seconds for other, seconds in own.items() if other != rank]
            if not others:
                return
            usual, step = max(statistics.median(others), 1e-3), told[rank]["step_s"]
            if rank in self.slow:
                if mine < 0.75 * TIMES * usual:
                    self.slow.remove(rank)
            elif mine > TIMES * usual and mine > SHARE * step:
                self.slow.add(rank)
                at = told[rank]["step"] + 1
                print(
                    f"step {at}: warning: rank {rank} is a straggler: its own part of a step takes "
                    f"{mine:.3g} s, that of the others {usual:.3g} s (medians of {WINDOW} steps)",
                    flush=True,
                )
                line = {"step": at - 1, "rank": rank, "own_s": mine, "others_s": usual}
                with (self.folder / FILE).open("a") as file:
                    file.write(json.dumps(line | {"time": time.time()}) + "\n")
