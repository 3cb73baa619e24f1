"""Schedule of gradient accumulation: microbatches and rows of each step; imports no torch.

    step      0  1  2  3  4  5  6        grad_accum 8 after a warmup of 4 steps
    accum     1  3  4  6  8  8  8        round(1 + (8 - 1) * step / 4), halves to the even number
    rows      0- 1- 4- 8-14-22-30-38     times rows_per_microbatch

A batch warmup changes the number of microbatches, never their shape. Everything here is a pure
function of the step, so a resumed run needs only its number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from megacpp.config.checks.mesh import batch_ranks
from megacpp.config.schema import Config


@dataclass(frozen=True)
class BatchSchedule:
    """Microbatches and rows of every optimizer step (the first is 0).

    Attributes:
        rows_per_microbatch: rows of one microbatch over all data ranks.
        grad_accum: microbatches of a step after the warmup.
        warmup_steps: steps of the warmup; 0: every step takes `grad_accum`.
    """

    rows_per_microbatch: int
    grad_accum: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        assert self.rows_per_microbatch >= 1 and self.grad_accum >= 1 and self.warmup_steps >= 0

    @property
    def start(self) -> int:
        """Microbatches of a warmup's first step: an eighth of the full number, at least 1."""
        return max(1, self.grad_accum // 8)

    def accum(self, step: int) -> int:
        """Return the microbatches of a step: linear from `start` to `grad_accum`, then rounded."""
        assert step >= 0
        if step >= self.warmup_steps:
            return self.grad_accum
        # As a fraction: in floats 0.5 may come out on either side of the half, by platform.
        grown = Fraction((self.grad_accum - self.start) * step, self.warmup_steps)
        return max(self.start, round(self.start + grown))

    def rows_before(self, step: int) -> int:
        """Return the global rows of all earlier steps."""
        return self._microbatches_before(step) * self.rows_per_microbatch

    def rows(self, step: int) -> range:
        """Return the global rows of a step; the next step continues at their end."""
        return range(self.rows_before(step), self.rows_before(step + 1))

    def distinct_accums(self) -> tuple[int, ...]:
        """Return every number of microbatches that a step can have, ascending."""
        if self.warmup_steps >= self.grad_accum - self.start:  # a step adds 1 or nothing
            first = self.start if self.warmup_steps else self.grad_accum
            return tuple(range(first, self.grad_accum + 1))
        return tuple(sorted({self.accum(step) for step in range(self.warmup_steps + 1)}))

    def describe(self) -> str:
        """Return a text such as `16 microbatches` or `1 to 8 microbatches over 4 steps`."""
        if not self.warmup_steps:
            return f"{self.grad_accum} microbatches"
        return f"{self.start} to {self.grad_accum} microbatches over {self.warmup_steps} steps"

    def _microbatches_before(self, step: int) -> int:
        assert step >= 0
        full = max(0, step - self.warmup_steps)
        return self._warmup_microbatches[step - full] + full * self.grad_accum

    @functools.cached_property
    def _warmup_microbatches(self) -> list[int]:
        """Microbatches before each step of the warmup and before the first full step."""
        return list(accumulate(map(self.accum, range(self.warmup_steps)), initial=0))


def batch_schedule(config: Config, world_size: int) -> tuple[BatchSchedule, str]:
    """Return the schedule of a resolved configuration, and the reason for a dropped warmup, or "".

    With `train.static_shapes` a whole step is one graph (as on XLA), which another number of
    microbatches would compile again; the warmup is then 0.
    """
    train = config.train
    assert train.grad_accum >= 1, "a resolved configuration"
    rows = train.device_batch_size * batch_ranks(config.mesh, world_size)
    warmup, reason = train.batch_warmup_steps, ""
    if train.static_shapes and warmup:
        reason = (
            f"train.batch_warmup_steps={warmup} is taken as 0 (train.static_shapes): a step that "
            f"is one graph needs the same {train.grad_accum} microbatches from the first one on"
        )
        warmup = 0
    return BatchSchedule(rows, train.grad_accum, warmup), reason
