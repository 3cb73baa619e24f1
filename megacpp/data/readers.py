"""Documents of one file: text, .jsonl[.gz|.zst] or .ndjson, .json, .parquet or .arrow.

Every reader yields `SourceDocument`s; a text that isn't valid UTF-8 becomes None, so that the
caller can count and skip it. Optional libraries load inside functions.
"""

from __future__ import annotations

import gzip
import importlib
import json
import shlex
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from megacpp.data.conversations import FIX, is_conversation, messages_of
from megacpp.data.files import LINE_BYTES, LINES, PACKED, json_records, readable, suffix
from megacpp.data.streams import stream_records
from megacpp.errors import DataError, did_you_mean
from megacpp.urls import STREAMED

if TYPE_CHECKING:
    from pyarrow import RecordBatch

FIELDS = ("text", "content")  # tried in this order if none is given
MESSAGES = "messages"  # field of a conversation
SHAREGPT = "conversations"  # of messages with `from` and `value`
PAIR = ("prompt", "completion")  # fields of a short one
PIECE_BYTES = 1 << 20


class SourceDocument(NamedTuple):
    """Document, with the number of bytes of its file that were consumed for it."""

    text: str | None  # None: not valid UTF-8
    read_bytes: int
    conversation: bool = False  # the text is a JSON list of messages


def read_file(path: Path, field: str, longest: int) -> Iterator[SourceDocument]:
    """Yield the documents of one file.

    Args:
        path: the file; its name tells its kind.
        field: field of the text in records (empty: text or content).
        longest: bytes of a text above which it is cut.

    Raises:
        DataError: unreadable file, broken record, missing or non-text field.
    """
    with readable(path):
        if str(path).startswith(STREAMED):
            yield from _cut_texts(_stream(str(path), field), longest)
        elif suffix(path) in (".parquet", ".arrow"):
            yield from _cut_texts(_table(path, field), longest)
        elif suffix(path) in LINES or (kind := json_records(path)) == "lines":
            yield from _cut_texts(_json_lines(path, field), longest)
        elif kind == "array":
            yield from _cut_texts(_json_array(path, field), longest)
        elif tool := PACKED.get(suffix(path)):
            raise DataError(
                f"{path}: is a packed text, and of packed files only .jsonl and .ndjson with .gz "
                f"or .zst are read. Fix: unpack it, `{tool} {shlex.quote(str(path))}`."
            )
        else:
            yield from _text_file(path, longest)


def _cut_texts(documents: Iterator[SourceDocument], longest: int) -> Iterator[SourceDocument]:
    """Split texts of more than `longest` bytes, as text files are."""
    for document in documents:
        text, read_bytes, whole = document
        if text is None or whole or 4 * len(text) <= longest:
            yield document
            continue
        if len(raw := text.encode()) <= longest:
            yield document
            continue
        del text
        at = 0
        while at < len(raw):
            end = (
                at + _cut(raw[at : at + longest + 1], longest)
                if len(raw) - at > longest
                else len(raw)
            )
            yield SourceDocument(raw[at:end].decode(), read_bytes)
            at, read_bytes = end, 0


def _text_file(path: Path, longest: int) -> Iterator[SourceDocument]:
    """Yield a text file as one document, or split into several of at most `longest` bytes."""
    rest = b""
    with path.open("rb") as file:
        while piece := file.read(max(longest, PIECE_BYTES)):
            rest += piece
            while len(rest) > longest:
                end = _cut(rest, longest)
                yield SourceDocument(_utf8(rest[:end]), end)
                rest = rest[end:]
    yield SourceDocument(_utf8(rest), len(rest))


def _cut(raw: bytes, longest: int) -> int:
    """Return the end of a document: a blank line, line, word or character.

    The end is at most `longest` bytes away, and at least half of that.
    """
    for mark in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        end = raw.rfind(mark, longest // 2, longest)
        if end >= 0:
            return end + len(mark)
    inside = (i for i in range(4) if longest > i and raw[longest - i] & 0xC0 != 0x80)
    return longest - next(inside, 0)  # a character has four bytes at most


def _json_lines(path: Path, field: str) -> Iterator[SourceDocument]:
    lines = _zst_lines(path) if path.suffix.lower() == ".zst" else _lines(path)
    for number, (raw, read_bytes) in enumerate(lines, start=1):
        raw = raw.removeprefix(BOM_UTF8) if number == 1 else raw  # no part of the first record
        if not raw.strip():
            continue
        line = _utf8(raw)
        text, conversation = (None, False) if line is None else _field(line, field, path, number)
        yield SourceDocument(text, read_bytes, conversation)


def _json_array(path: Path, field: str) -> Iterator[SourceDocument]:
    """Yield the records of a JSON array, which is parsed as a whole."""
    if (size := path.stat().st_size) > LINE_BYTES:
        raise DataError(
            f"{path}: a JSON array of {size:,} bytes, above {LINE_BYTES:,}, which is parsed at "
            "once. Fix: write one record a line to a .jsonl file."
        )
    try:
        records = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no valid JSON ({error}). Fix: repair it.") from None
    for number, record in enumerate(records):
        where = f"{path} record {number + 1}"
        if not isinstance(record, dict):
            raise DataError(f"{where}: is not a JSON object. Fix: write {{'text': ...}} for each.")
        text, conversation = _record(record, field, where)
        read_bytes = size * (number + 1) // len(records) - size * number // len(records)
        yield SourceDocument(text, read_bytes, conversation)


def _field(line: str, field: str, path: Path, number: int) -> tuple[str | None, bool]:
    """Return the text of one JSON record, and whether it is a conversation.

    None in place of a text that holds half of a surrogate pair.
    """
    where = f"{path} line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no valid JSON ({error}). Fix: repair or drop it.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: is not a JSON object. Fix: write {{'text': ...}} a line.")
    return _record(record, field, where)


def _stream(source: str, field: str) -> Iterator[SourceDocument]:
    for number, record in enumerate(stream_records(source), start=1):
        text, conversation = _record(record, field, f"{source} record {number}")
        yield SourceDocument(text, len(text or ""), conversation)


def _record(record: dict[str, Any], field: str, where: str) -> tuple[str | None, bool]:
    """Return the text of a record, and whether it is a conversation."""
    known = field or any(name in record for name in FIELDS)
    if field == MESSAGES or (not known and is_conversation(record)):
        text = json.dumps(messages_of(record, where), ensure_ascii=False)
        return (text if _encodes(text) else None), True
    if (field == SHAREGPT or not known) and isinstance(record.get(SHAREGPT), list):
        raise DataError(f"{where}: has {SHAREGPT!r}, which aren't read. {FIX}.")
    field = _present(field, record, where, "field")
    text = record[field]
    if text is None:  # an empty document, as a null of parquet is
        return "", False
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DataError(f"{where}: field {field!r} is {kind}, not text. Fix: choose another field.")
    return (text if _encodes(text) else None), False


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield lines, of a gzip file too; compressed bytes count for the line that needed them."""
    packed = path.suffix.lower() == ".gz"
    with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if packed else raw as file:
        consumed = 0
        try:
            while line := file.readline(LINE_BYTES + 1):
                _check_length(line, path)
                yield line, raw.tell() - consumed
                consumed = raw.tell()
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: corrupt gzip data ({error}). Fix: copy it again.") from None
        except EOFError:
            raise DataError(
                f"{path}: the gzip data ends early (truncated). Fix: copy it again."
            ) from None


def _check_length(line: bytes, path: Path) -> None:
    if len(line) > LINE_BYTES:
        raise DataError(
            f"{path}: a record of more than {LINE_BYTES:,} bytes. "
            "Fix: write that document as a text file, which is read in parts."
        )


def _zst_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield lines of a zstd file; the compressed bytes of a piece count for its first line."""
    rest = b""
    consumed = 0
    for piece, read_bytes in _zst_pieces(path):
        consumed += read_bytes
        *lines, rest = (rest + piece).split(b"\n")
        _check_length(rest, path)
        for line in lines:
            _check_length(line, path)
            yield line, consumed
            consumed = 0
    if rest:
        yield rest, consumed


def _zst_pieces(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield decompressed pieces; unlike a stream reader this detects a truncated frame."""
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


def _table(path: Path, field: str) -> Iterator[SourceDocument]:
    """Yield the rows of a Parquet or an Arrow file."""
    arrow = _optional("pyarrow", path)
    kind = suffix(path)[1:]
    try:
        if kind == "parquet":
            with importlib.import_module("pyarrow.parquet").ParquetFile(path) as file:
                share = path.stat().st_size / max(1, file.metadata.num_rows)
                yield from _rows(path, field, file.schema_arrow.names, file.iter_batches, share)
            return
        with path.open("rb") as raw:  # a stream as `datasets` writes it, or a file with an index
            ipc = importlib.import_module("pyarrow.ipc")
            indexed = raw.read(6) == b"ARROW1"
            raw.seek(0)
            reader = ipc.open_file(raw) if indexed else ipc.open_stream(raw)
            numbers = range(reader.num_record_batches) if indexed else None

            def batches(batch_size: int, columns: list[str]) -> Iterator[RecordBatch]:
                found = map(reader.get_batch, numbers) if numbers is not None else reader
                for batch in found:
                    wanted = batch.select(columns)
                    for start in range(0, wanted.num_rows, batch_size):
                        yield wanted.slice(start, batch_size)

            yield from _rows(path, field, reader.schema.names, batches, 0.0)
    except arrow.ArrowException as error:
        first = str(error).splitlines()[0]
        raise DataError(f"{path}: corrupt {kind} data ({first}). Fix: copy it again.") from None


def _rows(
    path: Path,
    field: str,
    names: Sequence[str],
    batches: Callable[..., Iterator[RecordBatch]],
    share: float,
) -> Iterator[SourceDocument]:
    """Yield the texts or conversations of a table.

    Args:
        path: its file, for messages.
        field: column of the text (empty: text or content).
        names: columns.
        batches: returns batches of `columns` with up to `batch_size` rows.
        share: bytes of the file for each row; 0: those that its values have.
    """
    talks = _conversation_columns(names, field)
    field = "" if talks else _present(field, names, str(path), "column")
    done = 0
    for batch in batches(batch_size=256, columns=talks or [field]):
        each = share or batch.nbytes / max(1, batch.num_rows)
        texts = _talks(path, batch, done) if talks else _cells(path, batch, field, done)
        for row, text in enumerate(texts):
            read_bytes = int(each * (done + row + 1)) - int(each * (done + row))
            yield SourceDocument(text, read_bytes, bool(talks))
        done += batch.num_rows


def _cells(path: Path, batch: RecordBatch, field: str, done: int) -> Iterator[str | None]:
    return (_cell(value, field, path, row) for row, value in enumerate(batch.column(0), start=done))


def _conversation_columns(names: Sequence[str], field: str) -> list[str]:
    """Return the columns of conversations, by the rule of JSON records; none: rows are texts."""
    columns: list[str] = [MESSAGES] if MESSAGES in names else [*PAIR]
    wanted = field == MESSAGES or not (field or set(FIELDS) & set(names))
    return columns if wanted and is_conversation(dict.fromkeys(names)) else []


def _talks(path: Path, batch: RecordBatch, done: int) -> Iterator[str]:
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError:
        where = f"{path} rows {done} to {done + batch.num_rows - 1}"
        raise DataError(f"{where}: a text isn't UTF-8. Fix: repair or drop it.") from None
    for row, record in enumerate(records, start=done):
        yield json.dumps(messages_of(record, f"{path} row {row}"), ensure_ascii=False)


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
    """Return False for a lone surrogate, which JSON can express and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _present(field: str, names: Iterable[object], where: str, what: str) -> str:
    """Return the given field, or the first of FIELDS that a record has."""
    known = [str(name) for name in names]
    found = next((f for f in ([field] if field else FIELDS) if f in known), None)
    if found is None:
        wanted = repr(field) if field else " or ".join(map(repr, FIELDS))
        if isinstance(names, dict):
            known = [name for name in known if isinstance(names[name], str)]
        fix = f"choose --field ({did_you_mean(field or FIELDS[0], known)})"
        fix = fix if known else "write the text as a field of the record: it has none of its own"
        if ".json " in where:  # --globs took it, perhaps for its characters
            fix += "; a copy named .txt is learned as it stands"
        raise DataError(f"{where}: has no {what} {wanted}. Fix: {fix}.")
    return found


def _optional(name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f"{path}: reading it needs {name}. Fix: pip install {name}.") from None
