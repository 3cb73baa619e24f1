"""Reading of a source into the document store, with notes of what was read."""

from __future__ import annotations

from megacpp.data.conversations import plain_text
from megacpp.data.document_store import DocumentStore
from megacpp.data.readers import read_file
from megacpp.data.sources import Source
from megacpp.data.spec import CorpusSpec
from megacpp.data.unfinished import FINISHED, Unfinished
from megacpp.errors import DataError, config_error
from megacpp.terminal.progress import Advance

NOTE_BYTES = 1 << 26  # of the source, read between two notes of what is stored
READ_COUNTS = ("read", "empty", "invalid_utf8", "duplicates", "conversations", "source_bytes")


def read_documents(
    spec: CorpusSpec, source: Source, store: DocumentStore, work: Unfinished, advance: Advance
) -> dict[str, int]:
    """Store new documents; return counts of read, empty, broken and duplicate ones.

    Args:
        spec: settings of the corpus.
        source: files to read.
        store: receives the documents.
        work: what was read before, and receives notes of what is.
        advance: called with the bytes that were read.

    Raises:
        ConfigError: fill-in-the-middle cuts conversations.
        DataError: a file can't be read, or too few documents have text.
    """
    counts = dict(work.counts) or dict.fromkeys(READ_COUNTS, 0)
    taken = dict(work.at)
    advance(counts["source_bytes"])
    done = {number for number, items in taken.items() if items == FINISHED}
    at: dict[int, int] = {}  # since the last note
    noted = 0

    def note(all_read: bool) -> None:
        store.flush()
        work.add_read(at, len(store.sizes), store.total_bytes, counts=counts, all_read=all_read)
        at.clear()

    for number, path in () if work.all_read else source.numbered(done):
        documents = read_file(path, spec.field, source.document_bytes)
        skipped = taken.get(number, 0)
        for items, (text, read_bytes, conversation) in enumerate(documents, start=1):
            if items <= skipped:
                continue
            counts["read"] += 1
            counts["source_bytes"] += read_bytes
            counts["conversations"] += conversation
            if text is None:
                counts["invalid_utf8"] += 1
            elif not text:
                counts["empty"] += 1
            elif not store.add(text.encode()):
                counts["duplicates"] += 1
            advance(read_bytes)
            noted += read_bytes
            if noted >= NOTE_BYTES:
                at[number], noted = items, 0
                note(all_read=False)
        at[number] = FINISHED
    if not work.all_read:
        note(all_read=True)
    conversations, _ = counts.pop("conversations"), counts.pop("source_bytes")
    if conversations:
        _check_conversations(spec, conversations, counts["read"])
        store.shown = plain_text
    if len(store.digests) < 2:
        found = f"{len(store.digests)} different documents with text"
        broken = counts["invalid_utf8"]
        latin = f", {broken} are not UTF-8 (iconv -t UTF-8 converts)" if broken else ""
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
