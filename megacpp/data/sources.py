"""Sources of documents: torch's headers, a folder, a file, a URL. This module imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megacpp.data.files import (
    CPP_GLOBS,
    PACKED,
    UTF16,
    choose_files,
    is_records,
    no_text,
    saved_files,
    suffix,
)
from megacpp.data.remote import RemoteFiles, remote_files
from megacpp.data.streams import stream_facts
from megacpp.errors import DataError
from megacpp.urls import STREAMED, is_url

TORCH_HEADERS = "torch-headers"
LONGEST = 1 << 21  # bytes of a document: encoding takes some hundred bytes for each
LONE_DOCUMENTS, LONE_SHORTEST = 1024, 1 << 11  # a single file: its documents, and least bytes


@dataclass(frozen=True)
class Source:
    """Files to read, in a fixed order.

    Attributes:
        description: line for the header of a run.
        files: files in order; of a URL their copies in the cache, made as they are read.
        total_bytes: bytes of all files.
        notes: lines about skipped or split files.
        document_bytes: longer text files are split.
        remote: files at a URL.
        origin: of a stream: what its content is from.
    """

    description: str
    files: tuple[Path, ...]
    total_bytes: int
    notes: tuple[str, ...] = ()
    document_bytes: int = LONGEST
    remote: RemoteFiles | None = None
    origin: str = ""

    def numbered(self, done: Collection[int] = ()) -> Iterator[tuple[int, Path]]:
        """Yield the files in order with their numbers, but those done; each when its turn comes."""
        numbers = [number for number in range(len(self.files)) if number not in done]
        if self.remote is None:
            yield from ((number, self.files[number]) for number in numbers)
            return
        files = tuple(self.remote.files[number] for number in numbers)
        yield from zip(numbers, replace(self.remote, files=files).fetched(), strict=True)

    @property
    def has_records(self) -> bool:
        """Whether a file has records with fields."""
        return bool(self.origin) or any(map(is_records, self.files))

    def facts(self) -> Iterator[tuple[object, ...]]:
        """Yield names, sizes and times or tags of the files, which stand for their content."""
        if self.remote is not None:
            yield from ((file.name, file.bytes, file.tag) for file in self.remote.files)
            return
        if self.origin:
            yield (self.origin,)
            return
        for path in self.files:
            stat = path.stat()
            yield str(path), stat.st_size, stat.st_mtime_ns


def find_source(source: str, globs: Sequence[str] = (), document_bytes: int = 0) -> Source:
    """Resolve `torch-headers`, a folder, a file, a URL or `datasets:NAME:SPLIT` to files to read.

    Args:
        source: `torch-headers`, a path, a URL, or a split that `datasets` streams.
        globs: patterns of files of a folder (none: every text and record file).
        document_bytes: longer text files are split at blank lines (0: 2 MiB; a single text file
            into about 1,024 documents).

    Raises:
        DataError: nothing exists there, or there is no file to take.
    """
    if source.startswith(STREAMED):
        size, origin = stream_facts(source)
        longest = document_bytes or LONGEST
        return Source(source, (Path(source),), size, (), longest, origin=origin)
    if is_url(source):
        remote = remote_files(source, globs)
        files = tuple(file.local for file in remote.files)
        notes = [f"{remote.skipped:,} other files are not taken"] if remote.skipped else []
        size = sum(file.bytes or 0 for file in remote.files)
        return Source(source, files, size, tuple(notes), document_bytes or LONGEST, remote)
    if source == TORCH_HEADERS:
        folder, globs = torch_headers(), globs or CPP_GLOBS
        kind = f"torch {_torch_version()} headers"
    else:
        folder, kind = Path(source), f"folder {source}"
    if folder.is_file():
        return _one_file(folder, document_bytes)
    if not folder.is_dir():
        raise DataError(f"source={source}: no such folder or file. Fix: check the path.")
    if not globs and (saved := saved_files(folder)):
        size = sum(file.stat().st_size for file in saved if file.is_file())
        kind = f"data set {source} ({len(saved):,} .arrow)"
        return Source(kind, tuple(saved), size, (), document_bytes or LONGEST)
    chosen = choose_files(folder, globs)
    notes = chosen.skipped
    longest = document_bytes or LONGEST
    sizes = [f.stat().st_size for f in chosen.files]
    long = sum(
        size > longest for f, size in zip(chosen.files, sizes, strict=True) if not is_records(f)
    )
    if long:
        notes = [*notes, f"{long:,} files above {longest:,} bytes are cut at blank lines"]
    name = f"{kind} ({chosen.taken})"
    return Source(name, tuple(chosen.files), sum(sizes), tuple(notes), longest)


def _one_file(path: Path, document_bytes: int) -> Source:
    """Return a record file, or a text file that is split so that a part can be held out."""
    size = path.stat().st_size
    if is_records(path):
        return Source(f"file {path}", (path,), size, (), document_bytes or LONGEST)
    if suffix(path) == ".json":
        raise DataError(
            f"source={path}: is neither an array of objects nor one object a line. "
            "Fix: write one record a line to a .jsonl file."
        )
    if suffix(path) not in PACKED and (why := no_text(path)):
        fix = "convert it, iconv -f UTF-16 -t UTF-8" if why == UTF16 else "give a text file"
        raise DataError(f"source={path}: is {why}, and UTF-8 is read. Fix: {fix}.")
    longest = document_bytes or min(LONGEST, max(LONE_SHORTEST, size // LONE_DOCUMENTS))
    note = f"one text file: cut at blank lines into documents of up to {longest:,} bytes"
    return Source(f"file {path}", (path,), size, (note,), longest)


def torch_headers() -> Path:
    """Return the folder of C++ headers in the installed torch package, without importing torch.

    Raises:
        DataError: the package has no such folder.
    """
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    folder = Path(next(iter(places))) / "include" if places else None
    if folder is None or not folder.is_dir():
        raise DataError(
            f"source={TORCH_HEADERS}: the installed torch has no include folder ({folder}). "
            "Fix: give --source FOLDER with C++ files."
        )
    return folder


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"
