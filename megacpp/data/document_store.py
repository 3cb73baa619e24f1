"""Distinct documents, stored on disk while a corpus is made, so that memory stays constant.

Memory holds a hash and two numbers per document; texts can be read back in any order.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from megacpp.data.unfinished import LeftoverError

ENTRY = struct.Struct("<32sQ")  # SHA-256 and bytes of a document


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
        self.digests: list[bytes] = []  # SHA-256 of document i
        self.sizes = array("Q")
        self.total_bytes = 0
        self.begins = array("Q")
        self._seen: set[bytes] = set()
        self._flushed = 0

    def __enter__(self) -> DocumentStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            self._note(digest, size)
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
        if digest in self._seen:
            return False
        self.file.write(raw)
        self._hashes.write(ENTRY.pack(digest, len(raw)))
        self._note(digest, len(raw))
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

    def _note(self, digest: bytes, size: int) -> None:
        self._seen.add(digest)
        self.digests.append(digest)
        self.sizes.append(size)
        self.begins.append(self.total_bytes)
        self.total_bytes += size
