"""Faults: small changes of one file each, listed in faults.toml."""

from __future__ import annotations

import ast
import functools
import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True)
class Fault:
    """Change of one file that a test must find.

    Attributes:
        file: path below the top folder.
        name: what is wrong then.
        offset: characters before the change.
        old, new: text there, before and after.
        accepted: why no test finds it; empty: one must.
    """

    file: str
    name: str
    offset: int
    old: str
    new: str
    accepted: str = ""

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault in it."""
        end = self.offset + len(self.old)
        assert text[self.offset : end] == self.old, "the file isn't that of the fault"
        return text[: self.offset] + self.new + text[end:]

    def line(self, text: str) -> int:
        """Return the number of the first line that it changes."""
        same = next(
            (i for i, (a, b) in enumerate(zip(self.old, self.new, strict=False)) if a != b), 0
        )
        return text.count("\n", 0, self.offset + same) + 1

    def key(self, text: str) -> str:
        """Return a name of this change of this text, the same in every run of the program."""
        return hashlib.sha256(f"{self.file}\0{self.planted(text)}".encode()).hexdigest()[:16]


def listed(root: Path, path: Path = LIST) -> list[Fault]:
    """Return the faults of the list.

    Raises:
        ValueError: a pattern doesn't occur exactly once, or nothing can be planted there.
    """
    return [found(entry, root) for entry in tomllib.loads(path.read_text())["fault"]]


def found(entry: dict[str, Any], root: Path) -> Fault:
    """Return the fault of an entry of the list, whose pattern occurs once in its file.

    Raises:
        ValueError: it doesn't, or the result isn't another program.
    """
    text, old, new = (root / entry["file"]).read_text(), entry["old"], entry["new"]
    where = f"{entry['file']}: {entry['name']}"
    if text.count(old) != 1:
        raise ValueError(f"{where}: the pattern occurs {text.count(old)} times, not once: {old!r}")
    fault = Fault(
        entry["file"], entry["name"], text.index(old), old, new, entry.get("accepted", "")
    )
    try:
        new = ast.dump(ast.parse(fault.planted(text)))
    except SyntaxError as error:
        raise ValueError(f"{where}: isn't Python: {error}") from error
    if new == program(text):
        raise ValueError(f"{where}: changes nothing")
    return fault


@functools.cache
def program(text: str) -> str:
    """Return what a text of Python says, without its comments and spaces."""
    return ast.dump(ast.parse(text))
