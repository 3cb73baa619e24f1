"""Copies of files at a URL, in a cache: of sources, runs and weights. This module imports no torch.

A file or a folder comes under another name, and gets its own when it is whole. What a break leaves
is gone on with. The name of a folder changes with the sizes and tags of its files, so a copy is
never older than what is at the URL.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.home import cache_folder
from megacpp.terminal.progress import Advance, progress_bars
from megacpp.urls import retried

PART = ".part"  # ends the name of what isn't whole
PIECE_BYTES = 1 << 20
MOST_BYTES = 64 << 30  # of all folders, besides those that a process uses
DIGESTS = {32: "MD5", 64: "SHA-256"}  # tags by their hexadecimal digits
TAGS = ("ETag", "etag", "md5Hash", "sha256", "blob_id", "LastModified", "mtime", "created")


class WrongBytesError(Exception):
    """Bytes that aren't those that the server announced."""


@dataclass(frozen=True)
class RemoteFile:
    """File at a URL.

    Attributes:
        name: path in its file system.
        bytes: its size; None: the server doesn't say.
        tag: what changes with its content: an ETag, a checksum or a time.
    """

    name: str
    bytes: int | None
    tag: str

    @staticmethod
    def listed(info: Mapping[str, Any]) -> RemoteFile:
        """Return the file that an entry of fsspec describes."""
        tag = next((str(info[key]).strip('"') for key in TAGS if info.get(key)), "")
        return RemoteFile(info["name"], info.get("size"), tag)

    @property
    def local(self) -> Path:
        """Path of its copy in the cache."""
        key = hashlib.sha256(f"{self.name}\0{self.bytes}\0{self.tag}".encode()).hexdigest()
        return cache_folder() / "remote" / f"{key[:16]}-{self.name.rpartition('/')[2]}"


def fetch_file(system: Any, file: RemoteFile, path: Path, advance: Advance | None = None) -> None:
    """Copy a file to a path, unless the path is there; processes that want the same one take turns.

    Args:
        system: file system of fsspec.
        file: at the URL.
        path: of the copy.
        advance: called with the bytes that came.

    Raises:
        Exception: the store has failed `ATTEMPTS` times, or sent other bytes than announced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}{PART}").open("ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)  # another process may fetch the same
        if path.is_file():
            path.touch()
        else:
            retried(lambda: _go_on(system, file, part, advance))
            Path(part.name).replace(path)
    Path(part.name).unlink(missing_ok=True)


def fetch_folder(url: str, system: Any, root: str, files: list[RemoteFile]) -> Path:
    """Return a folder of the cache with some files of a URL, by their paths below it.

    Nothing deletes the folder before this process ends.

    Args:
        url: of the folder.
        system: file system of fsspec.
        root: path of the folder in it.
        files: files below it.

    Raises:
        OSError: the disk has too little space.
        Exception: the store has failed, or sent other bytes than announced.
    """
    facts = repr((url, [(file.name, file.bytes, file.tag) for file in files]))
    name = f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}-{url.rstrip('/').rpartition('/')[2]}"
    folder = cache_folder() / "folders" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(f"{folder}.lock", os.O_CREAT | os.O_RDWR)  # open until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not folder.is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():  # nobody has fetched it meanwhile
            _fetch_into(folder, url, system, len(root.rstrip("/")) + 1, files)
        os.utime(folder)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except BaseException:
        os.close(lock)
        raise
    return folder


def _fetch_into(folder: Path, url: str, system: Any, below: int, files: list[RemoteFile]) -> None:
    """Make a folder of files whose names below it begin at a place of their paths."""
    total = sum(file.bytes or 0 for file in files)
    _make_room(folder.parent, total)
    pending = folder.with_name(f"{folder.name}{PART}")
    with progress_bars() as stage:
        advance = stage(f"fetching {url}", total)
        for file in files:
            fetch_file(system, file, pending / file.name[below:], advance)
    pending.rename(folder)


def _go_on(system: Any, file: RemoteFile, part: Any, advance: Advance | None) -> None:
    """Write to a part what it lacks of a file."""
    part.seek(0, 2)
    try:
        with system.open(file.name, "rb") as there:
            if part.tell():
                there.seek(part.tell())
            while piece := there.read(PIECE_BYTES):
                part.write(piece)
                if advance:
                    advance(len(piece))
        part.flush()
        _compare(file, Path(part.name))
    except (WrongBytesError, ValueError):  # a server that can't begin in the middle
        part.truncate(0)
        raise


def _compare(file: RemoteFile, part: Path) -> None:
    """Compare what came with what was announced; a tag of 32 or 64 digits is a digest."""
    size = part.stat().st_size
    if file.bytes is not None and size < file.bytes:
        raise EOFError(f"ended after {size:,} of {file.bytes:,} bytes")
    if file.bytes is not None and size > file.bytes:
        raise WrongBytesError(f"{file.name}: {size:,} bytes, announced {file.bytes:,}")
    for digits, algorithm in DIGESTS.items():
        if re.fullmatch(f"[0-9a-f]{{{digits}}}", file.tag):
            with part.open("rb") as content:
                found = hashlib.file_digest(content, algorithm.replace("-", "")).hexdigest()
            if found != file.tag:
                raise WrongBytesError(f"{file.name}: is corrupt ({algorithm} differs)")


def _make_room(cache: Path, wanted: int) -> None:
    """Delete the oldest folders, but those in use, until all have `MOST_BYTES` with what comes."""
    folders = [path for path in cache.iterdir() if path.is_dir()]
    sizes = {path: sum(f.stat().st_size for f in path.rglob("*")) for path in folders}
    total = wanted + sum(sizes.values())
    for path in sorted(folders, key=lambda path: path.stat().st_mtime):
        if total <= MOST_BYTES:
            break
        name = path.name.removesuffix(PART)
        with (cache / f"{name}.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a process uses it
                continue
            shutil.rmtree(path if path.name != name else path.rename(cache / f"{name}{PART}"))
            total -= sizes[path]
    if (free := shutil.disk_usage(cache).free) < wanted:
        raise OSError(f"{cache} needs {wanted:,} bytes, the disk has {free:,} free")
