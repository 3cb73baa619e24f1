"""Text that fits the screen: its width, wrapped lines, tables; imports no torch."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from megacpp.errors import config_error

PLAIN = 80  # columns of a file, a pipe or an unknown terminal
NARROWEST = 40
INTERRUPTED, NOBODY_READS = 130, 141  # exit codes after Ctrl-C, and after `| head`


def show_any_text() -> None:
    """Print characters that the screen's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end_on_interrupt(at_once: bool) -> None:
    """Let Ctrl-C end the process without a word, as while torch is imported, or raise as usual.

    An interrupt that is ignored, as behind `nohup`, stays so.
    """
    raising, ending = signal.default_int_handler, signal.SIG_DFL
    if signal.getsignal(signal.SIGINT) == (raising if at_once else ending):
        signal.signal(signal.SIGINT, ending if at_once else raising)


def nobody_reads(error: BaseException) -> bool:
    """Return whether an error says that the output's reader is gone; further output is discarded.

    rich turns a BrokenPipeError into a SystemExit.
    """
    if not isinstance(error, BrokenPipeError) and not isinstance(
        error.__context__, BrokenPipeError
    ):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def columns() -> int:
    """Return the columns of the output: COLUMNS if it is set, else the terminal's, else 80."""
    return max(NARROWEST, shutil.get_terminal_size((PLAIN, 24)).columns)


def wrapped(text: str, indent: str = "  ", first: str = "") -> list[str]:
    """Wrap a text into lines that fit the screen; words such as paths and flags stay whole.

    Args:
        text: text to wrap.
        indent: prefix of every line but the first.
        first: prefix of the first line.
    """
    return textwrap.wrap(
        text,
        columns(),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def labelled(label: str, text: str, width: int) -> list[str]:
    """Return `label` in a column of `width` characters, with a wrapped text beside it."""
    lines = wrapped(text, " " * width, " " * width)
    if len(label) + 1 <= width:
        return [label.ljust(width) + lines[0][width:], *lines[1:]]
    return [label.rstrip(), *lines]


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return aligned columns, the first `left` left-aligned, with a rule under the first row.

    If the table is wider than the screen, the widest left-aligned columns are wrapped.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [max(map(len, re.split(r"[\s./]+", rows[0][i]))) for i in range(left)]
    while sum(widths) + 2 * (len(widths) - 1) > columns():
        widest = max(range(left), key=lambda i: widths[i])
        if widths[widest] <= max(12, least[widest]):
            break
        widths[widest] -= 1
    out = [line for row in rows for line in _row(row, widths, left)]
    rule = "-" * max(map(len, out))
    heading = len(_row(rows[0], widths, left))
    return [*out[:heading], rule, *out[heading:]]


def _row(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    """Return a row of a table; right-hand cells stand beside the first line of wrapped ones."""
    cells = [_folded(cell, width) for cell, width in zip(row[:left], widths, strict=False)]
    height = max(map(len, cells), default=1)
    lines = []
    for n in range(height):
        parts = [
            (cell[n] if n < len(cell) else "").ljust(w)
            for cell, w in zip(cells, widths, strict=False)
        ]
        here = row[left:] if n == 0 else [""] * (len(row) - left)
        parts += [cell.rjust(w) for cell, w in zip(here, widths[left:], strict=True)]
        lines.append("  ".join(parts).rstrip())
    return lines


def _folded(cell: str, width: int) -> list[str]:
    """Split a cell into lines of at most `width`, after a space, a point, a comma or a slash."""
    indent = " " * (len(cell) - len(cell.lstrip()))
    lines, line = [], ""
    for part in re.findall(r"\s*[^\s.,/_]*[\s.,/_]?", cell.rstrip()):
        if line.strip() and len(line) + len(part.rstrip()) > width:
            lines.append(line.rstrip())
            line = indent + "  "
            part = part.lstrip()
        line += part
    return [*lines, line.rstrip()]


def duration(seconds: float) -> str:
    """Return seconds as `0:07`, `12:34` or `3:04:05`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def check_writable(key: str, path: Path) -> Path:
    """Return `path` if a file there can be opened for writing; an existing file is unchanged.

    Call it before any work, so that nothing is computed for a file that can't be written.

    Raises:
        ConfigError: the file can't be written.
    """
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise config_error(
            key, path, f"is not writable ({error.strerror})", f"give another --{key}"
        ) from None
    if not there:
        path.unlink()
    return path


def check_folder(key: str, path: Path) -> None:
    """Check that a folder can be created or written to, without creating it.

    Raises:
        ConfigError: the nearest existing folder may not be written, or isn't a folder.
    """
    try:
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return
    except OSError as error:  # a name that is too long, a loop of links
        rule = f"is no path ({(error.strerror or '').lower()})"
        raise config_error(key, path, rule, "choose a folder you may write") from None
    rule = "may not be written" if there.is_dir() else "is a file"
    rule = rule if there == path else f"can't be made below {there}, which {rule}"
    raise config_error(key, path, rule, "choose a folder you may write")
