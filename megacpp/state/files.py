"""Atomic files and folders that survive a power cut once they are published.

A folder is written as `NAME.tmp` and renamed. A folder that it replaces is first moved to
`NAME.old`, so at every moment one of the two is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megacpp.errors import config_error

PENDING, ASIDE = ".tmp", ".old"


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically (temporary name, then rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def parsed(text: bytes | str) -> dict[str, Any]:
    """Return the object that a text is; empty if it is none, as a line that a kill tore."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def read_parsed(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none that can be read."""
    with suppress(OSError):
        return parsed(path.read_bytes())
    return {}


def rows_by_step(path: Path) -> dict[int, dict[str, Any]]:
    """Return the objects of a JSON-lines file by `step`, the last one of each step."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    rows = map(parsed, lines)
    return {row["step"]: row for row in rows if type(row.get("step")) is int}


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a recorded configuration by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def pending_folder(final: Path) -> Path:
    """Return the empty folder in which `final` is written before it is published; it is on disk."""
    pending = final.with_name(final.name + PENDING)
    if pending.exists():
        shutil.rmtree(pending)
    pending.mkdir(parents=True)
    return pending


def publish_folder(pending: Path, final: Path) -> None:
    """Rename a written folder to `final`; an existing `final` is moved aside, not deleted."""
    _usual_modes(pending)
    sync(pending)
    aside = aside_of(final)
    if final.exists():
        if aside.exists():
            remove_folder(aside)
        os.replace(final, aside)
    os.replace(pending, final)
    sync(final.parent)


def _usual_modes(folder: Path) -> None:
    """Give every file the mode of a new one (umask): safetensors makes its files private."""
    probe = folder / f"mode{PENDING}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def aside_of(final: Path) -> Path:
    """Return the path to which a replaced `final` is moved until it is deleted."""
    return final.with_name(final.name + ASIDE)


def remove_folder(folder: Path) -> None:
    """Rename a folder before deleting it, so that no partial folder has a valid name."""
    doomed = folder.with_name(folder.name + ".deleted" + PENDING)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically."""
    temporary = path.with_name(path.name + PENDING)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def write_out(path: Path, text: str, left: str = "") -> None:
    """Write the file that `--out` names; atomically, unless it is a device or a pipe.

    Args:
        path: file to write.
        text: its content.
        left: words about what a failure leaves, behind the fix.

    Raises:
        ConfigError: the disk is full, or the file can't be written; an older one is unchanged.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path, text)
    except OSError as error:
        path.with_name(path.name + PENDING).unlink(missing_ok=True)
        why = (error.strerror or type(error).__name__).lower()
        fix = f"free disk space, or give another --out{left}"
        raise config_error("out", path, why, fix) from None


def tensor_bytes(path: Path) -> int:
    """Return the bytes of tensors in a safetensors file: all but the header and its length."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def sort_metadata(path: Path) -> None:
    """Sort the metadata in a safetensors file's header in place: the library's order is random."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(text) != size:
            return  # another spelling of the same header: a checkpoint is worth more than its order
        file.seek(8)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's content, or the renames inside a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
