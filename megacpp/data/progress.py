"""Progress bars of a long preparation, one per stage, with the time left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]  # called with the bytes that one step has dealt with
Stage = Callable[[str, int], Advance]  # name and bytes in total


@contextlib.contextmanager
def progress_bars() -> Iterator[Stage]:
    """Opens bars on stderr; silent where no one is watching."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:30}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bars:

        def stage(name: str, total: int) -> Advance:
            task = bars.add_task(name, total=total)
            return lambda amount: bars.advance(task, amount)

        yield stage
