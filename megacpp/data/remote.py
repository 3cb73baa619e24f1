"""Sources at a URL (s3://, gs://, hf://, https://), fetched to a local cache ahead of the reader.

One file is fetched while the one before is read. A file is kept under a name that changes with its
content, so a second preparation, or one after a kill, takes what is there; a part goes on where it
ended. The oldest files leave when all together have more than `MOST_BYTES`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.data.files import CARD, RECORD_SUFFIXES, of_other_splits
from megacpp.downloads import RemoteFile, fetch_file
from megacpp.errors import DataError
from megacpp.home import cache_folder
from megacpp.urls import ATTEMPTS, NoStoreError, one_line, open_store

TAKEN = (*RECORD_SUFFIXES, ".txt", ".md")  # without --globs
MOST_BYTES = 16 << 30  # of the cache, besides the file that is read and the next


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
        try:
            fetch_file(self.system, file, file.local)
        except Exception as error:  # each file system has errors of its own
            raise DataError(
                f"source={self.url}: {file.name} can't be fetched in {ATTEMPTS} attempts "
                f"({one_line(error)}). Fix: check network and rights, and start again: what came "
                "is kept."
            ) from None
        return file.local


def remote_files(url: str, globs: Sequence[str] = ()) -> RemoteFiles:
    """List the files of a URL: one file, or a folder's record and text files.

    Args:
        url: of a protocol that fsspec knows.
        globs: patterns of files to take instead.

    Raises:
        DataError: no such protocol, package, file or right.
    """
    try:
        system, path = open_store(url)
        found = [system.info(path)] if system.isfile(path) else []
        alone = bool(found)
        found = found or list(system.find(path, detail=True).values())
        if not found:
            system.info(path)  # which says what a listing keeps to itself
    except NoStoreError as error:
        raise DataError(f"source={url}: {error}. Fix: {error.fix}.") from None
    except Exception as error:  # each file system has errors of its own
        words = one_line(error)
        raise DataError(
            f"source={url}: can't be listed ({words}). "
            "Fix: check the URL, the network and your rights."
        ) from None
    below = len(path.rstrip("/")) + 1
    taken = [
        RemoteFile.listed(info)
        for info in sorted(found, key=lambda info: info["name"])
        if alone or _wanted(info["name"], info["name"][below:], globs)
    ]
    if not globs and any(file.name.endswith(RECORD_SUFFIXES) for file in taken):
        others = set(of_other_splits([file.name[below:] for file in taken]))
        taken = [file for file in taken if file.name.rpartition("/")[2] != CARD]
        taken = [file for file in taken if file.name[below:] not in others]
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
