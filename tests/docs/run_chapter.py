"""Run a chapter: every ```python block in one namespace, every ```output block must match.

    python tests/docs/run_chapter.py docs/05-mamba3.md [--update-docs]

A python block that prints is followed by an output block with exactly what it printed. The
working folder is a fresh temporary one. A ```console block is a command (`$ ...`, its lines ended
by backslashes) and what it prints: `megacpp` runs in this process and in that folder, `python` in
one of its own in the checkout; `megacpp train` is forked from this one. What follows `|` is the
shell's.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing  # noqa: F401 - now: it remembers the folder that a path is relative to
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacpp.cli.main import main
from megacpp.lessons.launch import forked

FENCE = re.compile(r"^```(python|output|console)\n(.*?)^```\n", re.S | re.M)
ANY_FENCE = re.compile(r"^```.*?^```\n", re.S | re.M)
COMMAND = re.compile(r"\$ (?:.*\\\n)*.*\n")
ROOT = Path(__file__).parents[2]
FOLDERS = ("--data.path", "--run.dir", "--checkpoint.init")  # a forked run starts in the checkout


class DriftError(AssertionError):
    """Error of a printed figure that differs from the chapter's."""


def run_chapter(path: Path, update: bool = False, before: Callable[[], None] = lambda: None) -> int:
    """Executes a chapter and compares (or, with `update`, rewrites) its printed figures.

    Args:
        path: the chapter.
        update: rewrite what differs, and warn of prose that repeats what isn't printed any more.
        before: writes files to the working folder that the chapter expects there.

    Returns:
        The number of output blocks that were compared or written.
    """
    text = path.read_text()
    names: dict[str, object] = {"__name__": path.stem}
    printed, compared, pieces, done = "", 0, [], 0
    with working_folder():
        before()
        for match in FENCE.finditer(text):
            line = text[: match.start()].count("\n") + 2
            if match[1] != "output" and printed:
                raise DriftError(f"{path.name}:{line}: the block before printed, but shows nothing")
            if match[1] == "python":
                printed = _execute(match[2], names, path, line)
                continue
            if match[1] == "console":
                command = COMMAND.match(match[2])[0]  # type: ignore[index]
                printed = command + run_command(command[2:].replace("\\\n", " ").strip())
            compared += 1
            if not update and printed != match[2]:
                raise DriftError(f"{path.name}:{line}: shows\n{match[2]}but prints\n{printed}")
            pieces += [text[done : match.start(2)], printed]
            done, printed = match.end(2), ""
    if printed:
        raise DriftError(f"{path.name}: the last block printed, but shows nothing")
    if update:
        after = "".join([*pieces, text[done:]])
        path.write_text(after)
        for line in left_in_prose(text, after, path.parent):
            warnings.warn(line, stacklevel=1)
    return compared


def left_in_prose(before: str, after: str, folder: Path) -> list[str]:
    """Return lines of prose with numbers of a chapter's blocks that are no longer printed.

    Args:
        before: the chapter as it was.
        after: the chapter as it is.
        folder: of all pages, which may repeat such a number.
    """
    old, new = (
        {n for m in FENCE.finditer(text) for n in figures(m[2])} for text in (before, after)
    )
    gone = {n for n in old - new if len(re.sub(r"\D", "", n)) > 1}
    short = {n for n in gone if len(n) < 3}  # so short that others are equal by chance
    found = []
    for page in sorted(folder.glob("*.md")):
        prose = ANY_FENCE.sub(lambda m: "\n" * m[0].count("\n"), page.read_text())
        for number, line in enumerate(prose.splitlines(), 1):
            stale = sorted((figures(line) & gone) - short | (measured(line) & short))
            if stale:
                found.append(
                    f"{page.name}:{number}: is {', '.join(stale)} still so? {line.strip()}"
                )
    return found


def measured(text: str) -> set[str]:
    """Return the whole numbers in a text that have a unit."""
    return set(re.findall(r"(?<![\w.,])(\d+) (?:%|(?:ms|s|[KMG]i?B)\b)", text))


def figures(text: str) -> set[str]:
    """Return the numbers in a text, and those of three digits and more rounded to whole ones."""
    found = set(re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w/])", text))
    return found | {f"{float(n.replace(',', '')):.0f}" for n in found if re.match(r"\d\d+\.", n)}


@contextlib.contextmanager
def working_folder():
    """Use a fresh temporary folder as the working folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def run_command(command: str) -> str:
    """Return what a command prints."""
    first, pipe, filters = command.partition(" | ")
    program, *words = shlex.split(first)
    if words[:1] == ["train"]:
        printed = _train(words[1:])
    elif program == "megacpp":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(words) == 0, command
        printed = out.getvalue()
    else:
        assert program == "python", command
        printed = _output([sys.executable, *words], cwd=ROOT)
    return _output(filters, input=printed, shell=True) if pipe else printed


def _train(words: list[str]) -> str:
    """Return what `megacpp train` prints, with folders as they were given."""
    here, ranks = f"{Path.cwd()}/", 1
    if "--nproc" in words:
        ranks = int(words.pop(words.index("--nproc") + 1))
        words.remove("--nproc")
    flags = [here + w if words[n - 1] in FOLDERS else w for n, w in enumerate(words)]
    done = forked(*flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(here, "")


def _output(command: str | list[str], **given: Any) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **given)
    return done.stdout


def _execute(code: str, names: dict[str, object], path: Path, line: int) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), names)
    return out.getvalue()


if __name__ == "__main__":
    chapter = Path(sys.argv[1]).resolve()
    number = run_chapter(chapter, update="--update-docs" in sys.argv)
    print(f"{chapter.name}: {number} printed figures")
