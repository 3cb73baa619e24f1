"""Where documents come from: torch's headers, a folder, .jsonl[.zst] or .parquet files.

Every reader yields `Item`s; a text that is no valid UTF-8 comes as None, so that the caller can
count and skip it. Nothing here imports torch, and optional libraries load inside functions.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from megacpp.errors import DataError, config_error, did_you_mean

TORCH_HEADERS = "torch-headers"
DEFAULT_GLOBS = ("*.h", "*.hpp", "*.cuh", "*.cpp", "*.cc", "*.cxx", "*.cu")
RECORD_SUFFIXES = (".jsonl", ".jsonl.zst", ".parquet")
PIECE_BYTES = 1 << 20


class Item(NamedTuple):
    """One document and how many bytes of its file have been consumed for it."""

    text: str | None  # None: not valid UTF-8
    read_bytes: int


@dataclass(frozen=True)
class Source:
    """Files to read, in a fixed order, and one line that says what they are."""

    description: str
    files: tuple[Path, ...]
    total_bytes: int


def find_source(source: str, globs: Sequence[str]) -> Source:
    """Resolves `torch-headers`, a folder, or one record file to the files to read.

    Raises:
        ConfigError: a file of unknown kind.
        DataError: nothing there, or no file matches the globs.
    """
    if source == TORCH_HEADERS:
        folder, kind = torch_headers(), f"torch {_torch_version()} headers"
    else:
        folder, kind = Path(source), f"folder {source}"
    if folder.is_file():
        if not folder.name.endswith(RECORD_SUFFIXES):
            kinds = ", ".join(RECORD_SUFFIXES)
            raise config_error(
                "source", source, f"must be a folder or a {kinds} file", "give its folder instead"
            )
        return _source(f"file {source}", [folder])
    if not folder.is_dir():
        raise DataError(f"source={source}: no such folder or file. Fix: check the path.")
    try:
        files = list(_matching(folder, globs))
    except OSError as error:
        raise DataError(f"source={source}: {error}. Fix: check the rights of the folder.") from None
    if not files:
        raise DataError(
            f"source={source}: no file matches {' '.join(globs)}. Fix: give other --globs."
        )
    return _source(f"{kind} ({' '.join(globs)})", files)


def torch_headers() -> Path:
    """The C++ headers inside the installed torch package, found without importing torch."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    folder = Path(next(iter(places))) / "include" if places else None
    if folder is None or not folder.is_dir():
        raise DataError(
            f"source={TORCH_HEADERS}: the installed torch has no include folder ({folder}). "
            "Fix: give --source FOLDER with C++ files."
        )
    return folder


def read_items(source: Source, field: str) -> Iterator[Item]:
    """Every document of a source; record files give one per record, other files one each.

    Raises:
        DataError: unreadable file, broken record, missing or non-text field.
    """
    for path in source.files:
        try:
            if path.name.endswith(".parquet"):
                yield from _parquet(path, field)
            elif path.name.endswith(RECORD_SUFFIXES):
                yield from _json_lines(path, field)
            else:
                raw = path.read_bytes()
                yield Item(_utf8(raw), len(raw))
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror or error}). Fix: check the file."
            ) from None


def _source(description: str, files: Sequence[Path]) -> Source:
    return Source(description, tuple(files), sum(f.stat().st_size for f in files))


def _matching(folder: Path, globs: Sequence[str]) -> Iterator[Path]:
    """Files whose name (or path below `folder`, for a glob with a slash) matches, sorted."""

    def unreadable(error: OSError) -> None:  # os.walk would leave the folder out without a word
        raise error

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            below = path.relative_to(folder).as_posix()
            wanted = any(fnmatch.fnmatchcase(below if "/" in g else name, g) for g in globs)
            if wanted and path.is_file():  # no dead link, no pipe
                yield path


def _json_lines(path: Path, field: str) -> Iterator[Item]:
    lines = _zst_lines(path) if path.name.endswith(".zst") else _plain_lines(path)
    for number, (raw, read_bytes) in enumerate(lines, start=1):
        if not raw.strip():
            continue
        line = _utf8(raw)
        yield Item(None if line is None else _field(line, field, path, number), read_bytes)


def _field(line: str, field: str, path: Path, number: int) -> str | None:
    """The text of one JSON record; None if it holds half of a surrogate pair."""
    where = f"{path} line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no valid JSON ({error}). Fix: repair or drop it.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: is no JSON object. Fix: write {{{field!r}: text}} a line.")
    if field not in record:
        raise DataError(
            f"{where}: has no field {field!r}. Fix: choose --field ({_hint(field, record)})."
        )
    text = record[field]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DataError(f"{where}: field {field!r} is {kind}, not text. Fix: choose another field.")
    return text if _encodes(text) else None


def _plain_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        for line in file:
            yield line, len(line)


def _zst_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines of a zstd file; the compressed bytes of a piece count for its first line."""
    rest = b""
    consumed = 0
    for piece, read_bytes in _zst_pieces(path):
        consumed += read_bytes
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line, consumed
            consumed = 0
    if rest:
        yield rest, consumed


def _zst_pieces(path: Path) -> Iterator[tuple[bytes, int]]:
    """Decompressed pieces; unlike a stream reader it notices a frame that ends early."""
    zstandard = _optional("zstandard", path)
    frame = None
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            read_bytes = len(piece)
            while piece:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(piece), read_bytes
                except zstandard.ZstdError as error:
                    raise DataError(
                        f"{path}: corrupt zstd data ({error}). Fix: copy it again."
                    ) from None
                read_bytes, piece = 0, frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise DataError(f"{path}: the zstd data ends early (truncated). Fix: copy it again.")


def _parquet(path: Path, field: str) -> Iterator[Item]:
    arrow = _optional("pyarrow", path)
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{path}: has no column {field!r}. Fix: choose --field ({_hint(field, names)})."
                )
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            done = 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for row, value in enumerate(batch.column(0), start=done):
                    read_bytes = int(share * (row + 1)) - int(share * row)
                    yield Item(_cell(value, field, path, row), read_bytes)
                done += batch.num_rows
    except arrow.ArrowException as error:
        first = str(error).splitlines()[0]
        raise DataError(f"{path}: corrupt parquet data ({first}). Fix: copy it again.") from None


def _cell(value: object, field: str, path: Path, row: int) -> str | None:
    try:
        text = value.as_py()  # type: ignore[attr-defined]
    except UnicodeDecodeError:
        return None
    if text is None:  # a null is an empty document
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{path} row {row}: column {field!r} is {type(text).__name__}, not text. "
            "Fix: choose another field."
        )
    return text


def _utf8(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _encodes(text: str) -> bool:
    """False for a lone surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _hint(field: str, names: object) -> str:
    return did_you_mean(field, [str(n) for n in names])  # type: ignore[union-attr]


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def _optional(name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f"{path}: reading it needs {name}. Fix: pip install {name}.") from None
