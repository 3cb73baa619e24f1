"""Reading of a source into the document store, with notes of what was read.

Files are read in any order: the corpus doesn't depend on it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megacpp.data.conversations import plain_text
from megacpp.data.document_store import DocumentStore
from megacpp.data.readers import read_file
from megacpp.data.sources import Source
from megacpp.data.spec import CorpusSpec
from megacpp.data.unfinished import FINISHED, Unfinished
from megacpp.data.workers import as_they_come, worker_count
from megacpp.errors import DataError, config_error
from megacpp.terminal.progress import Advance

NOTE_BYTES = 1 << 26  # of the source, read between two notes of what is stored
BATCH_BYTES = 1 << 20  # of the source, in one batch of documents
READ_COUNTS = ("read", "empty", "invalid_utf8", "duplicates", "conversations", "source_bytes")


class FilePart(NamedTuple):
    """File to read, its number, and how many of its documents are stored already."""

    number: int
    path: Path
    skipped: int


class ReadBatch(NamedTuple):
    """Documents of one file or more, with their SHA-256.

    Attributes:
        at: documents that were taken from each file so far; FINISHED: all.
        raws: texts that aren't empty.
        digests: of these.
        counts: READ_COUNTS but duplicates.
    """

    at: dict[int, int]
    raws: list[bytes]
    digests: list[bytes]
    counts: dict[str, int]


@dataclass(frozen=True)
class FileReading:
    """Reading, decoding and hashing of files, in this process or another.

    Attributes:
        field: field of the text in records.
        longest: bytes of a text above which it is cut.
        batch_bytes: bytes of the source that end a batch.
    """

    field: str
    longest: int
    batch_bytes: int

    def __call__(self, files: list[FilePart]) -> Iterator[ReadBatch]:
        """Yield the documents of files in batches."""
        batch = _empty()
        for number, path, skipped in files:
            for items, document in enumerate(read_file(path, self.field, self.longest), start=1):
                if items <= skipped:
                    continue
                text, read_bytes, conversation = document
                counts = batch.counts
                counts["read"] += 1
                counts["source_bytes"] += read_bytes
                counts["conversations"] += conversation
                if text:
                    batch.raws.append(text.encode())
                    batch.digests.append(hashlib.sha256(batch.raws[-1]).digest())
                else:
                    counts["invalid_utf8" if text is None else "empty"] += 1
                if max(counts["source_bytes"], counts["read"] << 9) >= self.batch_bytes:
                    batch.at[number] = items
                    yield batch
                    batch = _empty()
            batch.at[number] = FINISHED
        yield batch


def _empty() -> ReadBatch:
    return ReadBatch({}, [], [], {name: 0 for name in READ_COUNTS if name != "duplicates"})


def _groups(source: Source, at: Mapping[int, int]) -> Iterator[list[FilePart]]:
    """Yield files that aren't read, small ones together."""
    done = {number for number, items in at.items() if items == FINISHED}
    group: list[FilePart] = []
    size = 0
    for number, path in source.numbered(done):
        part = FilePart(number, path, at.get(number, 0))
        if source.remote or source.origin:  # a file at a URL may leave when the next one comes
            yield [part]
            continue
        group.append(part)
        size += path.stat().st_size
        if size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_documents(
    spec: CorpusSpec,
    source: Source,
    store: DocumentStore,
    work: Unfinished,
    workers: int,
    advance: Advance,
) -> dict[str, int]:
    """Store new documents; return counts of read, empty, broken and duplicate ones.

    Args:
        spec: settings of the corpus.
        source: files to read.
        store: receives the documents.
        work: what was read before, and receives notes of what is.
        workers: processes that read (0: see `worker_count`).
        advance: called with the bytes that were read.

    Raises:
        ConfigError: fill-in-the-middle cuts conversations.
        DataError: a file can't be read, or too few documents have text.
    """
    counts = dict(work.counts) or dict.fromkeys(READ_COUNTS, 0)
    advance(counts["source_bytes"])
    at: dict[int, int] = {}  # since the last note
    noted = 0

    def note(all_read: bool) -> None:
        store.flush()
        work.add_read(at, len(store.sizes), store.total_bytes, counts=counts, all_read=all_read)
        at.clear()

    if not work.all_read:
        # Files at a URL are there one at a time.
        count = 1 if source.remote or source.origin else worker_count(workers, source.total_bytes)
        reading = FileReading(spec.field, source.document_bytes, BATCH_BYTES)
        groups = _groups(source, dict(work.at))
        with contextlib.closing(as_they_come(reading, groups, count)) as batches:
            for batch in batches:
                for raw, digest in zip(batch.raws, batch.digests, strict=True):
                    counts["duplicates"] += not store.add(raw, digest)
                for name, amount in batch.counts.items():
                    counts[name] += amount
                at |= batch.at
                advance(batch.counts["source_bytes"])
                noted += batch.counts["source_bytes"]
                if noted >= NOTE_BYTES:
                    noted = 0
                    note(all_read=False)
        note(all_read=True)
    conversations, _ = counts.pop("conversations"), counts.pop("source_bytes")
    if conversations:
        _check_conversations(spec, conversations, counts["read"])
        store.shown = plain_text
    if len(store.digests) < 2:
        found = f"{len(store.digests)} different documents with text"
        broken = counts["invalid_utf8"]
        latin = f", {broken} are not UTF-8 (iconv -f LATIN1 -t UTF-8 converts)" if broken else ""
        raise DataError(
            f"source={spec.source}: {found}{latin}, a corpus needs 2 (one is held out). "
            "Fix: give more files, check --globs and --field, or cut files (--document-bytes 4096)."
        )
    return counts


def _check_conversations(spec: CorpusSpec, conversations: int, read: int) -> None:
    """Check that a source of conversations holds nothing else, and isn't to be cut.

    Raises:
        ConfigError: fill-in-the-middle cuts documents.
        DataError: some documents are plain texts.
    """
    if spec.fim_rate:
        raise config_error(
            "fim_rate", spec.fim_rate, "conversations aren't cut", "use --fim-rate 0"
        )
    if conversations < read:
        raise DataError(
            f"source={spec.source}: {conversations:,} of {read:,} documents are conversations. "
            "Fix: prepare the others as a corpus of their own, and mix them (--data.mix)."
        )
