"""Encoding of documents: ids with their marks, the mask of conversations, and counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megacpp.data import fim
from megacpp.data.conversations import ChatTemplate, plain_text
from megacpp.data.tokenizer import CorpusTokenizer

# Counts of a document: split as PSM or SPM, not reproduced by the tokenizer, bytes of its text;
# of a conversation bytes and tokens that are learned.
COUNTS = ("psm", "spm", "changed", "text_bytes", "learned_bytes", "targets")


class EncodedDocument(NamedTuple):
    """Ids of a document, and for a conversation 1 for each that is learned; its COUNTS."""

    columns: tuple[np.ndarray, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Encoder:
    """Conversion of stored documents to ids.

    Attributes:
        tokenizer: its tokenizer.
        talks: documents are conversations.
        seed: of fill-in-the-middle.
    """

    tokenizer: CorpusTokenizer
    talks: bool
    seed: int

    def encode(
        self, raws: Sequence[bytes], digests: Sequence[bytes], rate: float, held_out: bool
    ) -> list[EncodedDocument]:
        """Return documents as `BOS tokens EOS`, or as their chat template writes them.

        Args:
            raws: stored bytes.
            digests: SHA-256 of each.
            rate: share of documents that are split for fill-in-the-middle.
            held_out: count documents that the tokenizer changes.
        """
        if self.talks:
            return self._conversations(raws, held_out)
        marks = self.tokenizer.specials
        begin, end = (np.array([i], np.uint32) for i in (marks.bos, marks.eos))
        texts = [raw.decode() for raw in raws]
        cuts = [fim.cut(t, d, self.seed, rate) for t, d in zip(texts, digests, strict=True)]
        uncut = [text for text, parts in zip(texts, cuts, strict=True) if parts is None]
        whole, found = iter(self.tokenizer.encode_many(uncut)), []
        for text, raw, parts in zip(texts, raws, cuts, strict=True):
            changed = 0
            if parts is None:
                ids = next(whole)
                changed = int(held_out and self._changes(text, ids))
            else:
                assert marks.fim is not None, "checked before the source was read"
                ids = fim.arrange(parts, self.tokenizer.encode, marks.fim)
            spm = int(parts is not None and parts.suffix_first)
            counts = (int(parts is not None) - spm, spm, changed, len(raw), 0, 0)
            found.append(EncodedDocument((np.concatenate([begin, ids, end]),), counts))
        return found

    def _conversations(self, raws: Sequence[bytes], held_out: bool) -> list[EncodedDocument]:
        template, sizes_V = ChatTemplate(self.tokenizer), self.tokenizer.token_bytes_V
        found = []
        columns = template.encode([json.loads(raw) for raw in raws])
        for raw, (ids, learned) in zip(raws, columns, strict=True):
            text = plain_text(raw)
            changed = held_out and self._changes(
                text.decode(), self.tokenizer.encode(text.decode())
            )
            learned_bytes = int(sizes_V[ids[1:][learned[1:] > 0]].sum())
            targets = int(learned[1:].sum())
            counts = (0, 0, int(changed), len(text), learned_bytes, targets)
            found.append(EncodedDocument((ids, learned), counts))
        return found

    def _changes(self, text: str, ids: np.ndarray) -> bool:
        return self.tokenizer.decode(ids.tolist()) != text
