"""Sources at a URL (s3://, gs://, hf://, https://), fetched to a local cache ahead of the reader.

One file is fetched while the one before is read. A file is kept under a name that changes with its
content, so a second preparation, or one after a kill, takes what is there; a part goes on where it
ended. The oldest files leave when all together have more than `MOST_BYTES`.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.data.files import RECORD_SUFFIXES
from megacpp.errors import DataError
from megacpp.home import cache_folder

TAKEN = (*RECORD_SUFFIXES, ".txt", ".md")  # without --globs
PIECE_BYTES = 1 << 20
MOST_BYTES = 16 << 30  # of the cache, besides the file that is read and the next
ATTEMPTS, WAIT_S = 5, 1.0  # of a download; the wait doubles


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

    @property
    def local(self) -> Path:
        """Path of its copy in the cache."""
        key = hashlib.sha256(f"{self.name}\0{self.bytes}\0{self.tag}".encode()).hexdigest()
        return cache_folder() / "remote" / f"{key[:16]}-{self.name.rpartition('/')[2]}"


@dataclass(frozen=True)
class RemoteFiles:
    """Files of a URL, and how to get them."""

    url: str
    system: Any  # fsspec.AbstractFileSystem
    files: tuple[RemoteFile, ...]
    skipped: int

    def fetched(self) -> Iterator[Path]:
        """Yield the local copy of each file, and fetch the next meanwhile.

        Raises:
            DataError: a file can't be fetched, or isn't what the server announced.
        """
        with ThreadPoolExecutor(1) as ahead:
            coming = [ahead.submit(self._fetch, file) for file in self.files[:1]]
            for file in (*self.files[1:], None):
                path = coming.pop().result()
                if file is not None:
                    coming.append(ahead.submit(self._fetch, file))
                yield path
                _evict(None if file is None else file.local)

    def _fetch(self, file: RemoteFile) -> Path:
        """Return the local copy of a file, made now unless it is there."""
        path = file.local
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.part").open("ab") as part:
            fcntl.flock(part, fcntl.LOCK_EX)  # another process may fetch the same
            if path.is_file():
                path.touch()
            else:
                self._download(file, part)
                Path(part.name).replace(path)
        Path(part.name).unlink(missing_ok=True)
        return path

    def _download(self, file: RemoteFile, part: Any) -> None:
        error: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(WAIT_S * 2 ** (attempt - 1))
            part.seek(0, 2)
            try:
                with self.system.open(file.name, "rb") as there:
                    if part.tell():
                        there.seek(part.tell())
                    while piece := there.read(PIECE_BYTES):
                        part.write(piece)
                part.flush()
                _compare(file, Path(part.name))
                return
            except WrongBytesError as wrong:
                error = wrong
                part.truncate(0)
            except Exception as broken:  # each file system has errors of its own
                error = broken
                if isinstance(broken, ValueError):  # a server that can't begin in the middle
                    part.truncate(0)
        raise DataError(
            f"source={self.url}: {file.name} can't be fetched in {ATTEMPTS} attempts "
            f"({_words(error)}). Fix: check network and rights, and start again: what came is kept."
        )


class WrongBytesError(Exception):
    """Bytes that aren't those that the server announced."""


def _compare(file: RemoteFile, part: Path) -> None:
    """Compare a download with the size, and the MD5 that an ETag often is.

    Raises:
        WrongBytesError: they differ.
        EOFError: it is too short.
    """
    size = part.stat().st_size
    if file.bytes is not None and size < file.bytes:
        raise EOFError(f"ended after {size:,} of {file.bytes:,} bytes")
    if file.bytes is not None and size > file.bytes:
        raise WrongBytesError(f"{size:,} bytes, announced {file.bytes:,}")
    if re.fullmatch("[0-9a-f]{32}", file.tag):
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "md5").hexdigest()
        if found != file.tag:
            raise WrongBytesError(f"MD5 {found}, announced {file.tag}")


def is_url(source: str) -> bool:
    """Return whether a source is a URL and no path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", source) is not None


def remote_files(url: str, globs: Sequence[str] = ()) -> RemoteFiles:
    """List the files of a URL: one file, or a folder's record and text files.

    Args:
        url: of a protocol that fsspec knows.
        globs: patterns of files to take instead.

    Raises:
        DataError: no such protocol, package, file or right.
    """
    import fsspec

    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"source={url}: {_words(error)}. Fix: pip install 'megacpp[remote]', or check the URL."
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
        found = [system.info(path)] if system.isfile(path) else []
        alone = bool(found)
        found = found or list(system.find(path, detail=True).values())
    except Exception as error:  # each file system has errors of its own
        raise DataError(
            f"source={url}: can't be listed ({_words(error)}). Fix: check the URL and your rights."
        ) from None
    below = len(path.rstrip("/")) + 1
    taken = [
        RemoteFile(info["name"], info.get("size"), _tag(info))
        for info in sorted(found, key=lambda info: info["name"])
        if alone or _wanted(info["name"], info["name"][below:], globs)
    ]
    if not taken:
        rule = f"no file matches {' '.join(globs)}" if globs else f"no {', '.join(TAKEN)} file"
        raise DataError(
            f"source={url}: {rule} among {len(found):,}. Fix: check the URL, or give --globs."
        )
    return RemoteFiles(url, system, tuple(taken), len(found) - len(taken))


def _wanted(name: str, below: str, globs: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    if globs:
        return any(fnmatch.fnmatchcase(below if "/" in g else last, g) for g in globs)
    return name.endswith(TAKEN) and not any(part.startswith(".") for part in below.split("/"))


def _tag(info: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "md5Hash", "sha256", "blob_id", "LastModified", "mtime", "created")
    return next((str(info[key]).strip('"') for key in keys if info.get(key)), "")


def _words(error: BaseException | None) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _evict(next_file: Path | None) -> None:
    """Delete the oldest copies, but the next one, until the cache is within `MOST_BYTES`."""
    files = [path for path in (cache_folder() / "remote").iterdir() if path.suffix != ".part"]
    files = [path for path in files if path != next_file]
    facts = sorted(((path.stat(), path) for path in files), key=lambda fact: fact[0].st_mtime)
    total = sum(stat.st_size for stat, _ in facts)
    for stat, path in facts:
        if total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size
