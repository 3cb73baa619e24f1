"""Distinct documents, stored on disk while a corpus is made; texts can be read back in any order.

Memory holds 54 to 60 bytes a document: its hash, two numbers, and its place in a hash table.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megacpp.data.unfinished import LeftoverError

ENTRY = struct.Struct("<32sQ")  # SHA-256 and bytes of a document


class DigestTable(Sequence[bytes]):
    """SHA-256 of distinct documents by number, with a hash table to find one: 38 to 44 bytes each.

    The table (open addressing) has numbers plus one, 0 where it is empty.
    """

    def __init__(self) -> None:
        self._raw = bytearray()
        self._table = array("I", bytes(4 << 10))

    def __len__(self) -> int:
        return len(self._raw) >> 5

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return bytes(self._raw[32 * i : 32 * i + 32])

    def add(self, digest: bytes) -> bool:
        """Append a digest; return False if it is there already."""
        slot = self._slot(digest)
        if self._table[slot]:
            return False
        self._raw += digest
        self._table[slot] = len(self)
        if 3 * len(self) > 2 * len(self._table):
            self._table = array("I", bytes(8 * len(self._table)))
            for i in range(len(self)):
                self._table[self._slot(self[i])] = i + 1
        return True

    def _slot(self, digest: bytes) -> int:
        """Return where a digest is in the table, or would be."""
        mask = len(self._table) - 1
        slot = int.from_bytes(digest[:8], "little") & mask
        while (found := self._table[slot]) and self[found - 1] != digest:
            slot = slot + 1 & mask
        return slot


class DocumentStore:
    """Append-only file of distinct documents beside a file of their hashes.

    Args:
        folder: folder of the files `documents` and `digests`.

    Attributes:
        shown: what `read` makes of the stored bytes; None: it returns them.
    """

    def __init__(self, folder: Path) -> None:
        self.shown: Callable[[bytes], bytes] | None = None
        self.path, self.digest_path = folder / "documents", folder / "digests"
        self.file, self._hashes = self.path.open("a+b"), self.digest_path.open("a+b")
        self.digests = DigestTable()
        self.sizes = array("Q")
        self.total_bytes = 0
        self.begins = array("Q")
        self._flushed = 0

    def __enter__(self) -> DocumentStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        self._hashes.close()

    def recover(self, documents: int, advance: Callable[[int], None]) -> None:
        """Take over the first documents of files that are there, cut the rest off.

        Args:
            documents: documents that were flushed.
            advance: called with the bytes of each.

        Raises:
            LeftoverError: one of them hasn't its hash.
        """
        self._hashes.seek(0)
        self.file.seek(0)
        for _ in range(documents):
            entry = self._hashes.read(ENTRY.size)
            digest, size = ENTRY.unpack(entry) if len(entry) == ENTRY.size else (b"", 0)
            raw = self.file.read(size)
            if hashlib.sha256(raw).digest() != digest:
                raise LeftoverError(f"{self.path} isn't as it was written")
            self.digests.add(digest)
            self._note(size)
            advance(size)
        self._hashes.truncate(documents * ENTRY.size)
        self.file.truncate(self.total_bytes)
        self._flushed = self.total_bytes

    def add(self, raw: bytes, digest: bytes = b"") -> bool:
        """Append a document; return False if the same bytes are stored already.

        Args:
            raw: its bytes.
            digest: their SHA-256 if it is known.
        """
        digest = digest or hashlib.sha256(raw).digest()
        if not self.digests.add(digest):
            return False
        self.file.write(raw)
        self._hashes.write(ENTRY.pack(digest, len(raw)))
        self._note(len(raw))
        return True

    def flush(self) -> None:
        """Hand everything to the system, so that a kill of this process doesn't lose it."""
        self.file.flush()
        self._hashes.flush()
        self._flushed = self.total_bytes

    def read(self, i: int) -> bytes:
        """Return the text of document `i`, UTF-8."""
        return self.raw(i) if self.shown is None else self.shown(self.raw(i))

    def raw(self, i: int) -> bytes:
        """Return the stored bytes of document `i`."""
        if self._flushed < self.total_bytes:
            self.flush()
        return os.pread(self.file.fileno(), self.sizes[i], self.begins[i])

    def _note(self, size: int) -> None:
        self.sizes.append(size)
        self.begins.append(self.total_bytes)
        self.total_bytes += size
