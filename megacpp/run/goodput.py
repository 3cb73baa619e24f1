"""Goodput: wall time of a run by class, over all its starts, in a file that survives a kill.

    goodput = Goodput(folder, active)       # goodput.jsonl
    for step in ...:
        goodput.step(step)                  # what follows is `step` until something else says so
        for batch in goodput.reading(batches): ...
        with goodput.span("checkpoint"): ...
    goodput.close()

At each moment exactly one class is timed, so the seconds of all classes sum to those of the run. A
line of the file holds the seconds by class since the previous line. From the first step on, a line
is written where a span begins and ends, and between steps when a second has passed. A kill loses at
most that and the current span; the next start counts the loss as `restart_lost`, because it knows
the time of the last line.

    step          training, without what is below
    compile       the first step of a start with compiled blocks
    data          waiting for batches
    checkpoint    saving; resuming
    evaluation    held-out loss
    oom_retry     attempts that ran out of memory
    restart_lost  from the last sign of life to the next start, and steps done once more after it
    idle          all the rest; `startup` says how much of it was before the first step
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from megacpp.outcome import started_ticks
from megacpp.state.files import parsed

CLASSES = (
    *("step", "compile", "data", "checkpoint", "evaluation"),
    *("oom_retry", "restart_lost", "idle"),
)
OF_A_LINE = {*CLASSES, "startup"}
EVERY_S = 1.0  # between two lines of fast steps
FILE = "goodput.jsonl"
T = TypeVar("T")


class Goodput:
    """Timer of one start; writes on the main rank only.

    Args:
        folder: folder of the run.
        active: this rank writes.
        compiles: the first step counts as `compile`.
        retried_s: seconds so far of attempts that ran out of memory.
        began: start of the process in seconds since 1970; None reads it from the system.
        now: monotonic seconds.
        wall: seconds since 1970.

    Attributes:
        at: current step; None before the first.
        turns: changes of class so far.
        first: no step of this start is over.
    """

    def __init__(
        self,
        folder: Path,
        active: bool = True,
        compiles: bool = False,
        retried_s: float = 0.0,
        began: float | None = None,
        now: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = folder / FILE if active else None
        self._now, self._compiles = now, compiles
        began = process_began() if began is None else began
        # The wall clock may be adjusted during the run, so it is read once.
        self._offset = wall() - now()
        self._class, self._since = "startup", began - self._offset
        self._written = self._since
        self._spent: dict[str, float] = {}
        self._steps: list[int] = []
        self.at: int | None = None
        self.turns, self.first = 0, True
        self._carried = False  # the step is in the previous line
        self._file: TextIO | None = None
        self._turn("startup")
        retried_s = min(retried_s, self._spent["startup"])
        self._spent["startup"] -= retried_s
        self._spent["oom_retry"] = retried_s

    @property
    def phase(self) -> str:
        """Class that is timed now; before the first step also `startup`."""
        return self._class

    def step(self, step: int) -> None:
        """Begin step `step` (the first is 0), and end the one before."""
        first = self._class == "startup"
        self.at, self.first = step, first
        self._open()
        self._turn("compile" if first and self._compiles else "step")
        if first or self._now() - self._written >= EVERY_S:
            self._flush()
            self._carried = True
        if self._carried:
            self._steps.clear()
            self._carried = False
        self._steps.append(step)

    def alive(self) -> None:
        """Count as a change of class, which the watch over hangs takes for progress."""
        self.turns += 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block as class `name` instead of the current class, and write it at once."""
        try:
            with self.part(name):
                self._flush()
                yield
        finally:
            self._flush()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of every step as class `name`; the file gets no line for it."""
        assert name in CLASSES
        before = self._class
        self._turn(name)
        try:
            yield
        finally:
            self._turn(before)

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches; the time until each arrives counts as `data`."""
        iterator = iter(batches)
        while True:
            with self.part("data"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def idle(self) -> None:
        """End the last step."""
        self._open()
        self._turn("idle")
        self._flush()

    def close(self) -> None:
        """End the run: the time until another start isn't counted as lost."""
        self.idle()
        if self._file is not None:
            self._write({"end": self._since + self._offset})
            self._file.close()
            self._file = self._path = None

    def _open(self) -> None:
        """Open the file; a start that fails before its first step leaves it unchanged."""
        if self._path is None or self._file is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = self._path.open("a")
        self._write({"start": self._written + self._offset}, "\n" if torn else "")

    def _turn(self, name: str) -> None:
        """Change the class that is timed."""
        now = self._now()
        self._spent[self._class] = self._spent.get(self._class, 0.0) + now - self._since
        self._class, self._since = name, now
        self.turns += 1

    def _flush(self) -> None:
        if self._path is not None and self._file is None:
            return  # all time before the first step is one line
        if self._file is not None and self._since > self._written:
            line: dict[str, Any] = {
                "from": self._written + self._offset,
                "to": self._since + self._offset,
                "s": {name: spent for name, spent in self._spent.items() if spent},
            }
            if self._steps:
                line["steps"] = [self._steps[0], self._steps[-1]]
            self._write(line)
        self._written = self._since
        self._spent.clear()
        # The next line may still belong to this step.
        self._steps, self._carried = self._steps[-1:], True

    def _write(self, line: dict[str, Any], before: str = "") -> None:
        if self._file is not None:
            self._file.write(before + json.dumps(line) + "\n")
            self._file.flush()


# ---- reading ------------------------------------------------------------------------------------


@dataclass
class Start:
    """Lines of one start of a run."""

    began: float
    lines: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    @property
    def last(self) -> float:
        """Time of the last sign of life."""
        return max([self.began, *(line["to"] for line in self.lines)])

    @property
    def first_step(self) -> int | None:
        """First step of this start, or None."""
        return next((line["steps"][0] for line in self.lines if line.get("steps")), None)


@dataclass(frozen=True)
class Account:
    """Seconds of a run by class (CLASSES); they sum to `wall_s`.

    Attributes:
        startup_s: part of `idle` before the first steps.
        redone_s: part of `restart_lost` for steps that a later start repeated.
    """

    seconds: dict[str, float]
    wall_s: float
    startup_s: float
    redone_s: float
    starts: int

    @property
    def goodput(self) -> float:
        """Fraction of the wall time spent in training steps."""
        return self.seconds["step"] / self.wall_s if self.wall_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return asdict(self) | {"goodput": self.goodput}


def read_starts(path: Path) -> list[Start]:
    """Return the starts of a run in order; lines truncated by a kill are left out."""
    starts: list[Start] = []
    if not path.exists():
        return starts
    for text in path.read_bytes().split(b"\n"):
        line = _parsed(text)
        if "start" in line:
            starts.append(Start(line["start"]))
        elif starts and "to" in line:
            starts[-1].lines.append(line)
        elif starts and "end" in line:
            starts[-1].ended = True
    return starts


def account(starts: list[Start]) -> Account:
    """Assign every second of a run to a class."""
    seconds = dict.fromkeys(CLASSES, 0.0)
    startup = redone = wall = 0.0
    for number, start in enumerate(starts):
        later = [s.first_step for s in starts[number + 1 :] if s.first_step is not None]
        until = min(later, default=None)  # steps from here on were repeated
        known = 0.0
        for line in start.lines:
            again = _again(line.get("steps"), until)
            for name, spent in line["s"].items():
                known += spent
                redone += spent * again
                startup += spent * (1 - again) if name == "startup" else 0.0
                own = "idle" if name == "startup" else name
                seconds[own] += spent * (1 - again)
                seconds["restart_lost"] += spent * again
        lived = start.last - start.began
        seconds["idle"] += max(0.0, lived - known)  # missing lines
        wall += max(lived, known)
        if number + 1 < len(starts) and not start.ended:
            gap = max(0.0, starts[number + 1].began - start.last)
            seconds["restart_lost"] += gap
            wall += gap
    return Account(seconds, wall, startup, redone, len(starts))


def _again(steps: list[int] | None, until: int | None) -> float:
    """Return the fraction of a line's steps that a later start repeated."""
    if not steps or until is None or steps[1] < until:
        return 0.0
    first, last = steps
    return (last - max(first, until) + 1) / (last - first + 1)


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a line as a mapping, empty if it is truncated."""
    line = parsed(text)
    times = [line[key] for key in ("start", "end", "from", "to") if key in line]
    spent = line.get("s", {})
    steps = line.get("steps", [0, 0])
    sound = isinstance(spent, dict) and all(name in OF_A_LINE for name in spent)
    sound &= isinstance(steps, list) and len(steps) == 2 and all(type(x) is int for x in steps)
    numbers = [*times, *(spent.values() if isinstance(spent, dict) else ())]
    sound &= all(isinstance(x, float | int) and math.isfinite(x) for x in numbers)
    return line if sound and ("to" not in line or "s" in line) else {}


def process_began() -> float:
    """Return this process's start in seconds since 1970; now if the system doesn't tell."""
    ticks = started_ticks(os.getpid())
    if ticks is None:
        return time.time()
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up_s - ticks / os.sysconf("SC_CLK_TCK"))
