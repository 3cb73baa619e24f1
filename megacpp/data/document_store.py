"""Distinct documents, stored on disk while a corpus is made, so that memory stays constant.

Memory holds a hash and two numbers per document; texts can be read back in any order.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class DocumentStore:
    """Append-only file of distinct documents; leaving the context deletes the file.

    Attributes:
        shown: what `read` makes of the stored bytes; None: it returns them.
    """

    def __init__(self, path: Path) -> None:
        self.shown: Callable[[bytes], bytes] | None = None
        self.path = path
        self.file = path.open("w+b")
        self.digests: list[bytes] = []  # SHA-256 of document i
        self.sizes = array("Q")
        self.total_bytes = 0
        self._starts = array("Q")
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
        self.path.unlink()

    def add(self, raw: bytes) -> bool:
        """Append a document; return False if the same bytes are stored already."""
        digest = hashlib.sha256(raw).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        self.digests.append(digest)
        self.sizes.append(len(raw))
        self._starts.append(self.total_bytes)
        self.file.write(raw)
        self.total_bytes += len(raw)
        return True

    def read(self, i: int) -> bytes:
        """Return the text of document `i`, UTF-8."""
        return self.raw(i) if self.shown is None else self.shown(self.raw(i))

    def raw(self, i: int) -> bytes:
        """Return the stored bytes of document `i`."""
        if self._flushed < self.total_bytes:
            self.file.flush()
            self._flushed = self.total_bytes
        return os.pread(self.file.fileno(), self.sizes[i], self._starts[i])
