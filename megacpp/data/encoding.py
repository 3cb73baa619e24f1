"""Encoding of documents: ids with their marks, the mask of conversations, and counts.

A document's result follows from its bytes alone, so any number of processes gives the same.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megacpp.data import fim
from megacpp.data.conversations import ChatTemplate, plain_text
from megacpp.data.tokenizer import CorpusTokenizer

# Counts of a document: split as PSM or SPM, bytes of its text; of a conversation bytes and tokens
# that are learned; if it is held out, whether the tokenizer changes it, and its bytes by gzip -9.
COUNTS = ("psm", "spm", "text_bytes", "learned_bytes", "targets", "changed", "gzip_bytes")


class EncodingJob(NamedTuple):
    """Documents to encode: where they begin in the file of documents, their sizes and hashes.

    Attributes:
        begins: first byte of each.
        sizes: bytes of each.
        digests: SHA-256 of each.
        rate: share of documents that are split for fill-in-the-middle.
        held_out: they are held out: find what the tokenizer and gzip make of them.
    """

    begins: list[int]
    sizes: list[int]
    digests: list[bytes]
    rate: float
    held_out: bool


class EncodedDocument(NamedTuple):
    """Ids of a document, and for a conversation 1 for each that is learned; its COUNTS."""

    columns: tuple[np.ndarray, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Encoder:
    """Conversion of stored documents to ids, in this process or another.

    Attributes:
        documents: their file.
        talks: documents are conversations.
        seed: of fill-in-the-middle.
    """

    documents: Path
    tokenizer: CorpusTokenizer
    talks: bool
    seed: int

    def __call__(self, job: EncodingJob) -> list[EncodedDocument]:
        """Return documents as `BOS tokens EOS`, or as their chat template writes them."""
        with self.documents.open("rb", buffering=0) as file:
            places = zip(job.sizes, job.begins, strict=True)
            raws = [os.pread(file.fileno(), size, begin) for size, begin in places]
        if self.talks:
            return self._conversations(raws, job.held_out)
        return self._texts(raws, job)

    def _texts(self, raws: list[bytes], job: EncodingJob) -> list[EncodedDocument]:
        marks = self.tokenizer.specials
        begin, end = (np.array([i], np.uint32) for i in (marks.bos, marks.eos))
        texts = [raw.decode() for raw in raws]
        cuts = [
            fim.cut(text, digest, self.seed, job.rate)
            for text, digest in zip(texts, job.digests, strict=True)
        ]
        uncut = [text for text, parts in zip(texts, cuts, strict=True) if parts is None]
        whole, found = iter(self.tokenizer.encode_many(uncut)), []
        for raw, parts in zip(raws, cuts, strict=True):
            tried = (0, 0)
            if parts is None:
                ids = next(whole)
                tried = self._tried(raw, ids) if job.held_out else tried
            else:
                assert marks.fim is not None, "checked before the source was read"
                ids = fim.arrange(parts, self.tokenizer.encode, marks.fim)
            spm = int(parts is not None and parts.suffix_first)
            counts = (int(parts is not None) - spm, spm, len(raw), 0, 0, *tried)
            found.append(EncodedDocument((np.concatenate([begin, ids, end]),), counts))
        return found

    def _conversations(self, raws: Sequence[bytes], held_out: bool) -> list[EncodedDocument]:
        template, sizes_V = ChatTemplate(self.tokenizer), self.tokenizer.token_bytes_V
        found = []
        columns = template.encode([json.loads(raw) for raw in raws])
        for raw, (ids, learned) in zip(raws, columns, strict=True):
            text = plain_text(raw)
            tried = self._tried(text, self.tokenizer.encode(text.decode())) if held_out else (0, 0)
            learned_bytes = int(sizes_V[ids[1:][learned[1:] > 0]].sum())
            targets = int(learned[1:].sum())
            counts = (0, 0, len(text), learned_bytes, targets, *tried)
            found.append(EncodedDocument((ids, learned), counts))
        return found

    def _tried(self, text: bytes, ids: np.ndarray) -> tuple[int, int]:
        changed = self.tokenizer.decode(ids.tolist()) != text.decode()
        return int(changed), len(gzip.compress(text, 9, mtime=0))
