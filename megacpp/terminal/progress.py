"""Progress of long work on the error stream: bars on a terminal, else a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from megacpp.terminal.screen import duration

Advance = Callable[[int], None]  # called with the units (bytes, blocks, ...) that are done
Stage = Callable[[str, int], Advance]  # name and units in total
Item = TypeVar("Item")

EVERY_S = 5.0  # between two lines without a terminal


@contextlib.contextmanager
def progress_bars(keep: bool = False) -> Iterator[Stage]:
    """Open stages of work, each with its completed share and the remaining time.

    Args:
        keep: leave the bars on the screen when the work is done.
    """
    if not sys.stderr.isatty():
        yield _lines
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(bar_width=32),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=not keep) as bars:

        def stage(name: str, total: int) -> Advance:
            task = bars.add_task(name, total=total)
            return lambda amount: bars.advance(task, amount)

        yield stage


def counted(items: Iterable[Item], name: str, total: int) -> Iterator[Item]:
    """Yield `total` items, with progress while the caller processes them."""
    with progress_bars() as stage:
        advance = stage(name, total)
        for item in items:
            yield item
            advance(1)


def _lines(name: str, total: int) -> Advance:
    """Return a stage that prints lines such as `activations: 40 %, 0:12 left`."""
    began = printed = time.monotonic()
    done = 0

    def advance(amount: int) -> None:
        nonlocal done, printed
        done, now = min(total, done + amount), time.monotonic()
        if now - printed >= EVERY_S and done:
            printed, left_s = now, (now - began) / done * (total - done)
            line = f"{name}: {done / total:.0%}, {duration(left_s)} left"
            print(line, file=sys.stderr, flush=True)

    return advance
