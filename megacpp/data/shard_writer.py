"""Writing of token shards with their offsets and checksums, also behind shards that are there."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megacpp.data.shards import BlockSums, file_entry, little_endian
from megacpp.data.tokenizer import file_sha256
from megacpp.data.unfinished import LeftoverError


class SplitWriter:
    """Writer of one split, shard by shard; `close` returns its entry for the index.

    Args:
        folder: folder of the corpus.
        split: name of the split.
        dtype: dtype of the ids.
        shard_tokens: tokens that close a shard, with the document that reaches them.
        done: shards that are there, as `closed` returned them.

    Raises:
        LeftoverError: one of these isn't there as it was written.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: str,
        shard_tokens: int,
        done: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.folder, self.split = folder, split
        self.dtype, self.shard_tokens = little_endian(dtype), shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.file: BinaryIO | None = None
        self.hash = hashlib.sha256()
        self.blocks = BlockSums()
        self.documents = self.tokens = 0
        self._ends = array("Q")  # of the documents of the open shard
        self._ends_sha256 = ""
        self._offsets = (folder / f"{split}-documents.bin").open("r+b" if done else "w+b")
        self._offsets.write(bytes(8))
        for entry in done:
            self._recover(dict(entry))

    def add(self, ids: np.ndarray) -> bool:
        """Append a whole document; return whether it closed the shard, having `shard_tokens`."""
        if self.file is None:
            name = f"{self.split}-{len(self.shards):05d}.bin"
            self.shards.append({"file": name, "tokens": 0, "documents": 0})
            self.file, self.hash = (self.folder / name).open("wb"), hashlib.sha256()
            self.blocks = BlockSums()
        raw = ids.astype(self.dtype).tobytes()
        self.file.write(raw)
        self.hash.update(raw)
        self.blocks.update(raw)
        self.documents += 1
        self.tokens += len(ids)
        self._ends.append(self.tokens)
        self.shards[-1]["tokens"] += len(ids)
        self.shards[-1]["documents"] += 1
        if self.shards[-1]["tokens"] >= self.shard_tokens:
            self._close_shard()
        return self.file is None

    def closed(self) -> dict[str, Any]:
        """Return what a later writer needs to go on behind the shard that was closed last."""
        assert self.file is None
        return self.shards[-1] | {"ends_sha256": self._ends_sha256}

    def close(self) -> dict[str, Any]:
        """Finish the last shard and the offsets; return counts, sizes and hashes of all files."""
        self._close_shard()
        self._offsets.truncate()
        self._offsets.close()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "offsets": file_entry(Path(self._offsets.name)),
            "shards": self.shards,
        }

    def _close_shard(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            size = self.file.tell()
            self.file.close()
            sums = {"sha256": self.hash.hexdigest(), "blocks": self.blocks.hexdigests()}
            self.shards[-1] |= {"bytes": size, **sums}
            self.file = None
            ends = np.asarray(self._ends, "<u8").tobytes()
            self._offsets.write(ends)
            self._offsets.flush()
            self._ends, self._ends_sha256 = array("Q"), hashlib.sha256(ends).hexdigest()

    def _recover(self, entry: dict[str, Any]) -> None:
        ends = self._offsets.read(8 * entry["documents"])
        path = self.folder / entry["file"]
        if (
            hashlib.sha256(ends).hexdigest() != entry.pop("ends_sha256")
            or not path.is_file()
            or path.stat().st_size != entry["bytes"]
            or file_sha256(path) != entry["sha256"]
        ):
            raise LeftoverError(f"{path} isn't as it was written")
        self.shards.append(entry)
        self.documents += entry["documents"]
        self.tokens += entry["tokens"]
