"""Files and folders that appear whole or not at all, and survive a power cut once they appeared.

A folder is written as `NAME.tmp` and renamed. One that replaces another moves it aside to
`NAME.old` first, so at every moment one of the two is complete.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

PENDING, ASIDE = ".tmp", ".old"


def pending_folder(final: Path) -> Path:
    """Where `final` is written before it is published; empty and on the disk on return."""
    pending = final.with_name(final.name + PENDING)
    if pending.exists():
        shutil.rmtree(pending)
    pending.mkdir(parents=True)
    return pending


def publish_folder(pending: Path, final: Path) -> None:
    """Makes a written folder visible as `final`; what was there is moved aside, not deleted."""
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
    """Gives every file the mode of a new one (umask): safetensors makes its own for the owner."""
    probe = folder / f"mode{PENDING}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def aside_of(final: Path) -> Path:
    """Where the folder that `final` replaced waits for its deletion."""
    return final.with_name(final.name + ASIDE)


def remove_folder(folder: Path) -> None:
    """Deletes a folder under a name that nobody reads: never half a folder with a good name."""
    doomed = folder.with_name(folder.name + ".deleted" + PENDING)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    temporary = path.with_name(path.name + PENDING)
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def tensor_bytes(path: Path) -> int:
    """Bytes of tensors in a safetensors file: all but its header and the header's length."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def sync(path: Path) -> None:
    """Waits until a file's content, or the renames inside a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
