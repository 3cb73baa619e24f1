"""Corpus files: token shards, document offsets, tokenizer, and an index with their hashes.

    index.json              counts, hashes and arguments (`read_index` checks its own hash)
    tokenizer.json          CorpusTokenizer.token_bytes_V: UTF-8 bytes of each id
    tokenizer_config.json   which special tokens stand around documents
    train-00000.bin ...     token ids, uint16 or uint32, little-endian; a shard ends with a document
    train-documents.bin     uint64: where each document starts in the split, and the end
    train-learned-...       of conversations: uint8, 1 for each token that is learned
    validation-...          the same for the held-out documents

A split is one stream of documents, `BOS tokens... EOS` each, in index order. The index holds a
CRC-32 of every 256 KiB of a shard; a reader checks a block when it first reads from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import zlib
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from megacpp.data.tokenizer import file_sha256
from megacpp.errors import DataError

FORMAT_VERSION = 2  # version 1 had no block checksums
LEARNED_VERSION = 3  # of corpora that learn some tokens only
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation")
BLOCK_BYTES = 1 << 18
AGAIN = "Fix: run `megacpp data prepare --force` with the --source and --out of this corpus"


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def little_endian(dtype: str) -> np.dtype:
    """Return the dtype in the byte order of the files, whatever the machine's own is."""
    return np.dtype(dtype).newbyteorder("<")


class BlockSums:
    """CRC-32 of each BLOCK_BYTES of a file that is written in pieces."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._room = 0  # bytes left in the last block

    def update(self, raw: bytes) -> None:
        """Append bytes."""
        view = memoryview(raw)
        while view:
            if not self._room:
                self._sums.append(0)
                self._room = BLOCK_BYTES
            piece, view = view[: self._room], view[self._room :]
            self._sums[-1] = zlib.crc32(piece, self._sums[-1])
            self._room -= len(piece)

    def hexdigests(self) -> str:
        """Return eight hexadecimal digits a block, concatenated."""
        return "".join(f"{value:08x}" for value in self._sums)


class FileArray:
    """Array in a file, read by position: a file that shrinks under its reader is an error.

    A memory map would end the process by SIGBUS.

    Args:
        path: file to read.
        dtype: of the entries.
        fix: end of error messages.
    """

    def __init__(self, path: Path, dtype: str | np.dtype, fix: str) -> None:
        self.path, self.dtype, self.fix = path, np.dtype(dtype), fix
        self._file = path.open("rb", buffering=0)
        self._length = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> int:
        return int(self.read(i, i + 1)[0])

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return entries `[begin, end)`.

        Raises:
            DataError: the file has become shorter, or can't be read.
        """
        width, pieces = self.dtype.itemsize, []
        at, stop = begin * width, end * width
        while at < stop:
            try:
                piece = os.pread(self._file.fileno(), stop - at, at)
            except OSError as error:
                raise DataError(f"{self.path}: {error.strerror}. {self.fix}.") from None
            if not piece:
                block = f"block {at // BLOCK_BYTES} (bytes {at:,} to {stop:,})"
                raise DataError(f"{self.path}: {block}: truncated while in use. {self.fix}.")
            pieces.append(piece)
            at += len(piece)
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), self.dtype)


class SplitReader:
    """Token stream of a split over its shards.

    Attributes:
        checked: number of blocks compared with the index so far.
        learned: of conversations: 1 for each token that is learned.

    Raises:
        DataError: shards and index disagree on counts.
    """

    def __init__(self, folder: Path, split: str, index: dict[str, Any]) -> None:
        entry = index["splits"][split]
        dtype = little_endian(index["dtype"])
        self.split, self.vocab_size = split, index["vocab_size"]
        self.tokens, self.documents = entry["tokens"], entry["documents"]
        self.fix = again(index, folder)
        self.names = [shard["file"] for shard in entry["shards"]]
        self.sums = [bytes.fromhex(shard["blocks"]) for shard in entry["shards"]]
        self.sound = [bytearray(len(sums) // 4) for sums in self.sums]
        self.checked = 0
        self.shards = [FileArray(folder / name, dtype, self.fix) for name in self.names]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.offsets = FileArray(folder / entry["offsets"]["file"], "<u8", self.fix)
        if self.starts[-1] != self.tokens or len(self.offsets) != self.documents + 1:
            raise DataError(f"{folder}: {split} shards and index disagree on counts. {self.fix}.")
        self.learned: SplitReader | None = None
        if mask := entry.get("learned"):
            name = f"{split}-learned"
            alike = index | {"dtype": "uint8", "vocab_size": 2, "splits": {name: mask}}
            self.learned = SplitReader(folder, name, alike)

    def read(self, start: int, stop: int, place: str) -> np.ndarray:
        """Return int64 tokens `[start, stop)`.

        Args:
            start: first token of the split.
            stop: one past the last token.
            place: position of the tokens, for error messages.

        Raises:
            DataError: a block differs from the index (names shard, block and documents), or an id
                is outside the vocabulary (names shard and `place`).
        """
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        last = int(np.searchsorted(self.starts, stop, "left"))
        pieces = []
        for i in range(first, last):
            low = int(self.starts[i])
            begin, end = max(start - low, 0), min(stop - low, len(self.shards[i]))
            self._check_blocks(i, begin, end)
            piece = self.shards[i].read(begin, end).astype(np.int64)
            if len(piece) and piece.max() >= self.vocab_size:
                at = int(np.argmax(piece >= self.vocab_size))
                raise DataError(
                    f"{self.names[i]} {place}: token {max(start, low) + at} of the split has id "
                    f"{piece[at]}, not below vocab_size {self.vocab_size}. {self.fix}."
                )
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _check_blocks(self, i: int, begin: int, end: int) -> None:
        """Check the blocks of shard `i` that hold its tokens `[begin, end)`, each once."""
        sound, width = self.sound[i], self.shards[i].dtype.itemsize
        for block in range(begin * width // BLOCK_BYTES, -(-end * width // BLOCK_BYTES)):
            if sound[block]:
                continue
            first = block * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, len(self.shards[i]) * width)
            found = zlib.crc32(self.shards[i].read(first // width, last // width).tobytes())
            if found != int.from_bytes(self.sums[i][4 * block : 4 * block + 4], "big"):
                tokens = (int(self.starts[i]) + at // width for at in (first, last - 1))
                one, two = (bisect_right(self.offsets, t) - 1 for t in tokens)
                raise DataError(
                    f"{self.names[i]} block {block} (bytes {first:,} to {last:,}, documents "
                    f"{one} to {two} of {self.split}): its CRC-32 differs from the index "
                    f"(corrupt). {self.fix}."
                )
            sound[block] = 1
            self.checked += 1

    def document_ids(self, start: int, stop: int) -> np.ndarray:
        """Return the document number in the split of each token of `[start, stop)`, int64.

        Raises:
            DataError: the offsets have changed since the corpus was opened.
        """
        low = bisect_right(self.offsets, start) - 1
        high = bisect_left(self.offsets, stop)
        found = self.offsets.read(max(low, 0), min(high + 1, len(self.offsets))).astype(np.int64)
        if low < 0 or not (found[0] <= start < stop <= found[-1] and (np.diff(found) > 0).all()):
            path = self.offsets.path
            raise DataError(f"{path}: documents {low} to {high} are out of order. {self.fix}.")
        begins = np.zeros(stop - start, np.int64)
        begins[found[1 : high - low] - start] = 1
        return low + np.cumsum(begins)

    def document(self, number: int) -> np.ndarray:
        """Return int64 tokens of a document, BOS and EOS included."""
        start, stop = (int(i) for i in self.offsets.read(number, number + 2))
        return self.read(start, stop, f"document {number}")


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write index.json with its own hash inside."""
    text = json.dumps({"sha256": _index_sha256(index), **index}, indent=1, ensure_ascii=False)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def read_index(folder: Path, verify: bool = False) -> dict[str, Any]:
    """Return the index of a complete corpus.

    Args:
        folder: folder of the corpus.
        verify: read and hash all files.

    Raises:
        DataError: no folder, no index, another version, or a file that is missing, truncated or
            changed.
    """
    if not folder.is_dir():
        raise DataError(
            f"data.path={folder}: no such folder. "
            f"Fix: run `megacpp data prepare --out {shlex.quote(str(folder))}`."
        )
    if not (folder / INDEX).is_file():
        raise DataError(
            f"data.path={folder}: holds no {INDEX}, so it is not a corpus. "
            f"Fix: run `megacpp data prepare` with another --out, or check the path."
        )
    index = _parse_index(folder)
    fix = again(index, folder)
    for split in SPLITS:
        for part in _parts(index, split):
            for entry in part["shards"]:
                _check_file(folder, entry, verify, fix)
            # Offsets determine every row; they take eight bytes a document.
            _check_file(folder, part["offsets"], True, fix)
    _check_file(folder, index["tokenizer"], True, fix)  # small, and every byte count depends on it
    return index


def again(index: dict[str, Any], folder: Path) -> str:
    """Return the command that rebuilds a corpus, as a fix."""
    return f"Fix: run `{index['command']} --out {shlex.quote(str(folder))} --force`"


def fingerprint(index: dict[str, Any]) -> str:
    """Return a short hash of the corpus's content: tokenizer, token and offset files."""
    hashes = [index["dtype"], index["tokenizer"]["sha256"]]
    for split in SPLITS:
        for part in _parts(index, split):
            hashes += [part["offsets"]["sha256"], *(shard["sha256"] for shard in part["shards"])]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12]


def file_entry(path: Path) -> dict[str, Any]:
    """Return name, size and hash of a file, as the index stores them."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _parse_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, own_hash = index["format_version"], index.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: cannot be read as an index ({reason}). {AGAIN}.") from None
    if version not in (FORMAT_VERSION, LEARNED_VERSION):
        source = shlex.quote(str(index.get("arguments", {}).get("source", "FOLDER")))
        raise DataError(
            f"{path}: made by another edition of megacpp (format {version}, this one reads "
            f"{FORMAT_VERSION} and {LEARNED_VERSION}). "
            f"Fix: run `megacpp data prepare {source} --out {shlex.quote(str(folder))} --force`, "
            "same settings."
        )
    if own_hash != _index_sha256(index):
        raise DataError(f"{path}: its content does not match its own hash (changed). {AGAIN}.")
    return index


def _check_file(folder: Path, entry: dict[str, Any], verify: bool, fix: str) -> None:
    path = folder / entry["file"]
    if path.parent != folder:
        raise DataError(f"{folder}: the index points outside ({entry['file']}). {fix}.")
    if not path.is_file():
        raise DataError(f"{path}: missing, the index lists it. {fix}.")
    size = path.stat().st_size
    if size != entry["bytes"]:
        what = "truncated" if size < entry["bytes"] else "too long"
        raise DataError(f"{path}: {what} ({size} bytes, index says {entry['bytes']}). {fix}.")
    if verify and file_sha256(path) != entry["sha256"]:
        raise DataError(f"{path}: SHA-256 differs from the index (corrupt). {fix}.")


def _parts(index: dict[str, Any], split: str) -> list[dict[str, Any]]:
    """Return the entry of a split, and that of its mask."""
    entry = index["splits"][split]
    return [entry, entry["learned"]] if "learned" in entry else [entry]


def _index_sha256(index: dict[str, Any]) -> str:
    canonical = json.dumps(index, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
