"""Folder of a corpus that is being made: a start behind a killed one goes on with what is finished.

    .NAME.TOKEN.partial/    beside the corpus NAME
        lock                held by the process that makes the corpus; the system frees a dead one's
        progress.jsonl      what was asked for, then a line for each part that is finished
        documents, digests  distinct documents (DocumentStore)
        corpus/             files of the corpus so far; becomes NAME

A line follows the bytes that it counts, so a kill loses what came after the last line and no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from megacpp.data.sources import Source
from megacpp.data.spec import CorpusSpec

LAYOUT = 1  # of the folder and of its lines
JOURNAL = "progress.jsonl"
RETIRED = "retired"  # the corpus that was at its place
FINISHED = -1  # in place of a number of documents: the whole file was read


class LeftoverError(Exception):
    """File of a killed start that isn't as it was written."""


class Unfinished:
    """Claimed folder of a corpus that is being made, and what is finished in it.

    Attributes:
        folder: the folder.
        at: documents that an earlier start took from each file, by its number; FINISHED: all.
        counts: counts of the documents that were read.
        documents, text_bytes: documents that are stored, and their bytes.
        all_read: no file is left to read.
        tokenizer: facts and files of the tokenizer; empty until it is there.
        shards: for each split, its records (see `add_shard`).
    """

    def __init__(self, folder: Path, lock: TextIO) -> None:
        self.folder, self._lock = folder, lock
        self.corpus = folder / "corpus"
        self._journal: TextIO | None = None
        self._clear()

    def _clear(self) -> None:
        self.at: dict[int, int] = {}
        self.counts: dict[str, int] = {}
        self.documents = self.text_bytes = 0
        self.all_read = False
        self.tokenizer: dict[str, Any] = {}
        self.shards: dict[str, list[dict[str, Any]]] = {}

    def begin(self, wanted: Mapping[str, Any]) -> None:
        """Delete what is there, and note what the corpus is made from."""
        self.close()
        self._clear()
        for path in self.folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.corpus.mkdir()
        self._append(dict(wanted))

    def goes_on(self, wanted: Mapping[str, Any]) -> str:
        """Take over what is finished; return why not, if something else was asked for."""
        lines = _lines(self.folder / JOURNAL)
        if not lines:
            return "it had not begun"
        if other := _difference(lines[0], wanted):
            return other
        for record in lines[1:]:
            self._take(record)
        # A line that the kill cut short must not stand in front of the next.
        whole = self.folder / f"{JOURNAL}.new"
        whole.write_text("".join(json.dumps(line) + "\n" for line in lines))
        whole.replace(self.folder / JOURNAL)
        return ""

    def add_read(self, at: Mapping[int, int], documents: int, text_bytes: int, **more: Any) -> None:
        """Note that documents were read and stored.

        Args:
            at: files that were read from, as the attribute has them.
            documents: stored documents.
            text_bytes: bytes of these.
            more: `counts` and `all_read`.
        """
        self._append({"read": {"at": at, "documents": documents, "bytes": text_bytes, **more}})

    def add_tokenizer(self, facts: Mapping[str, Any], files: list[dict[str, Any]]) -> None:
        """Note that the tokenizer's files are written."""
        self._append({"tokenizer": {"facts": facts, "files": files}})

    def add_shard(self, split: str, entries: list[dict[str, Any]], sums: list[int]) -> None:
        """Note that a shard is written, and the mask beside it if there is one.

        Args:
            split: its split.
            entries: of the shards (`SplitWriter.closed`).
            sums: of the documents of the split up to its end.
        """
        self._append({"shard": {"split": split, "entries": entries, "sums": sums}})

    def kept(self) -> str:
        """Return what is finished, for a message; empty: nothing."""
        parts = []
        if self.documents:
            parts.append(f"{self.documents:,} documents ({self.text_bytes:,} bytes)")
        if self.tokenizer:
            parts.append("the tokenizer")
        if shards := [shard["entries"][0] for of in self.shards.values() for shard in of]:
            some = f"{len(shards):,} shard{'s' * (len(shards) != 1)}"
            parts.append(f"{some} of {sum(s['tokens'] for s in shards):,} tokens")
        return ", ".join(parts)

    def close(self) -> None:
        """Close the journal; the folder stays claimed."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def release(self, delete: bool) -> None:
        """Give the folder up, and delete it or leave it to the next start."""
        self.close()
        if delete:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _append(self, record: dict[str, Any]) -> None:
        if self._journal is None:
            self._journal = (self.folder / JOURNAL).open("a")
        self._journal.write(json.dumps(record) + "\n")
        self._journal.flush()
        if len(record) == 1:
            self._take(record, at=False)

    def _take(self, record: dict[str, Any], at: bool = True) -> None:
        if read := record.get("read"):
            if at:  # no more than the next start needs
                self.at |= {int(number): items for number, items in read["at"].items()}
            self.documents, self.text_bytes = read["documents"], read["bytes"]
            self.counts, self.all_read = dict(read["counts"]), read["all_read"]
        elif shard := record.get("shard"):
            self.shards.setdefault(shard["split"], []).append(shard)
        else:
            self.tokenizer = record["tokenizer"]


def claim(final: Path, wanted: Mapping[str, Any]) -> Unfinished:
    """Return the folder of a killed start of the same corpus, or a new one.

    Other folders of killed starts are deleted. Which it is, is said on the error stream.

    Args:
        final: path of the corpus.
        wanted: what it is made from (`identity`).
    """
    left, taken, why = _leftovers(final), None, ""
    for old in left:
        if not (why := old.goes_on(wanted)):
            taken = old
            break
    for old in left:
        if old is not taken:
            old.release(delete=True)
    if taken is not None:
        kept = taken.kept() or "nothing"
        _say(f"{final}: going on behind a killed start, which finished {kept}")
        return taken
    if why:
        _say(f"{final}: what a killed start left isn't used ({why}): everything is made anew")
    made = _new(final)
    made.begin(wanted)
    return made


def discard(final: Path) -> None:
    """Delete the folders of killed starts of a corpus that is there."""
    for old in _leftovers(final):
        old.release(delete=True)


def identity(spec: CorpusSpec, source: Source, tokenizer: Path | None) -> dict[str, Any]:
    """Return what the bytes of a corpus follow from: settings, files and versions.

    Args:
        spec: settings.
        source: files; names, sizes and times stand for their content.
        tokenizer: a given one, by its content.
    """
    import tokenizers

    digest = hashlib.sha256()
    for fact in source.facts():
        digest.update(repr(fact).encode() + b"\n")
    beside = sorted(tokenizer.parent.glob("*token*")) if tokenizer else []
    beside += sorted(tokenizer.parent.glob("chat_template*")) if tokenizer else []
    return {
        "layout": [LAYOUT, tokenizers.__version__],
        "arguments": spec.arguments(),
        "files": digest.hexdigest(),
        "tokenizer": [hashlib.sha256(path.read_bytes()).hexdigest() for path in beside],
    }


def _new(final: Path) -> Unfinished:
    """Make a folder and lock it; again if another start took it for a leftover in between."""
    while True:
        folder = final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        folder.mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):
            lock = (folder / "lock").open("w")
            with contextlib.suppress(OSError):  # without locks no other start takes it over
                fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").stat()
            return Unfinished(folder, lock)


def _leftovers(final: Path) -> list[Unfinished]:
    """Claim all folders that killed starts left; restore a corpus that one had put aside."""
    name = re.compile(rf"\.{re.escape(final.name)}\.\d+-[0-9a-f]+\.partial")
    found = []
    for path in sorted(final.parent.glob(f".{glob.escape(final.name)}.*.partial")):
        if not name.fullmatch(path.name):
            continue
        try:
            lock = (path / "lock").open("r+")
        except OSError:  # killed before it had a lock
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives
            lock.close()
            continue
        if (path / RETIRED).is_dir() and not final.exists():
            (path / RETIRED).rename(final)
        found.append(Unfinished(path, lock))
    return found


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return what differs between two identities; empty: nothing."""
    wanted = json.loads(json.dumps(wanted))
    if found.get("layout") != wanted["layout"]:
        return "made by other versions"
    arguments = found["arguments"]
    for key, value in wanted["arguments"].items():
        if arguments.get(key) != value:
            return f"{key}={arguments.get(key)} there, {value} here"
    if found["files"] != wanted["files"]:
        return "the files of the source have changed"
    return "the tokenizer has changed" if found["tokenizer"] != wanted["tokenizer"] else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal; one that a kill cut short ends it."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
