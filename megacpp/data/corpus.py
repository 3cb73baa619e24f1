"""Rows and batches of a corpus: pure functions of (seed, global row), equal on every machine.

Legend: B rows, T tokens of a row, V ids of the vocabulary.

    stream   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...        (documents end to end)
    row 0    t0 t1 t2 t3 | t4                      row r reads T + 1 tokens from r * T:
    row 1                  t4 t5 t6 t7 | t8        T inputs and, one later, T labels

Rows of conversations hold whole documents (rows.py), and only learned tokens are labels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megacpp.data.batches import IGNORED, Batch
from megacpp.data.compressors import compressor_lines
from megacpp.data.conversations import ChatTemplate
from megacpp.data.held_out import MIN_DOCUMENTS
from megacpp.data.order import shuffled
from megacpp.data.rows import whole_rows
from megacpp.data.shards import TOKENIZER, SplitReader, fingerprint, read_index
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.errors import DataError
from megacpp.model.documents import Documents


class TokenRow(NamedTuple):
    """Token, label and document number (within its split) of each position of a row."""

    ids_T: np.ndarray
    labels_T: np.ndarray
    documents_T: np.ndarray


class Corpus:
    """Prepared corpus, cut into rows of `seq_len` tokens; it stores no position.

    Args:
        path: folder made by `megacpp data prepare`.
        seq_len: tokens of a row.
        seed: seed of the order in which training rows are visited.
        verify: hash every file now; sizes are always checked.

    Raises:
        DataError: missing, truncated or changed files, or fewer tokens than one row needs.
    """

    def __init__(self, path: str | Path, seq_len: int, seed: int = 42, verify: bool = False):
        assert seq_len >= 1, "a row needs a token"
        self.path, self.seq_len, self.seed = Path(path), seq_len, seed
        self.index = read_index(self.path, verify)
        self.train = SplitReader(self.path, "train", self.index)
        self.validation = SplitReader(self.path, "validation", self.index)
        self.vocab_size: int = self.index["vocab_size"]
        self.rows_per_epoch = (self.train.tokens - 1) // seq_len
        self.num_validation_rows = -(-(self.validation.tokens - 1) // seq_len)
        self._whole: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if self.train.learned:
            for reader in (self.train, self.validation):
                offsets = reader.offsets.read(0, reader.documents + 1)
                self._whole[reader.split] = whole_rows(offsets, seq_len)
            self.rows_per_epoch, self.num_validation_rows = (
                len(begins) for begins, _ in self._whole.values()
            )
        if not self.rows_per_epoch:
            raise DataError(
                f"data.seq_len={seq_len}: the training split of {self.path} has only "
                f"{self.train.tokens} tokens, one row needs {seq_len + 1}. "
                f"Fix: use --data.seq-len {self.train.tokens - 1} or less, or a larger corpus."
            )

    @functools.cached_property
    def tokenizer(self) -> CorpusTokenizer:
        """Tokenizer that the corpus was written with."""
        return CorpusTokenizer.load(self.path / TOKENIZER)

    @functools.cached_property
    def token_bytes_V(self) -> Tensor:
        """UTF-8 bytes of each id, int64; 0 for special ids."""
        return torch.from_numpy(self.tokenizer.token_bytes_V)

    @property
    def fingerprint(self) -> str:
        """Short hash of tokens, boundaries and tokenizer."""
        return fingerprint(self.index)

    @property
    def counters(self) -> dict[str, Any]:
        """Counters to save with the state of a run, by name: none, a row number says it all."""
        return {}

    def begin_step(self, step: int, row: int) -> None:
        """Begin a step at a global row: nothing changes (a `Mixture` may change its shares)."""

    def changes_at(self, step: int) -> bool:
        """Return whether rows from a step on come in another order: never."""
        return False

    def split_row(self, global_row: int) -> int:
        """Return the training split's row for a global row; an epoch visits each row once."""
        epoch, index = divmod(global_row, self.rows_per_epoch)
        return shuffled(index, self.rows_per_epoch, self.seed, epoch)

    def row_tokens(self, global_row: int) -> int:
        """Return the positions of a training row, by its global number, that aren't padding."""
        if not self.train.learned:
            return self.seq_len
        begins, ends = self._whole["train"]
        row = self.split_row(global_row)
        return max(1, int(ends[row] - begins[row]) - 1)

    def train_batch(self, rows: Sequence[int]) -> Batch:
        """Return training rows by global number.

        Raises:
            DataError: a corrupt block or an unknown id; the error names shard and row.
        """
        return self._batch(rows, [self.row("train", self.split_row(row)) for row in rows])

    def validation_batch(self, rows: Sequence[int]) -> Batch:
        """Return validation rows by number; rows past the end hold padding only and no label.

        Ranks that share an evaluation can therefore all take the same number of equal batches.
        """
        return self._batch(rows, [self.row("validation", row) for row in rows])

    def validation_batches(self, device_batch: int, max_rows: int = 0) -> Iterator[Batch]:
        """Yield the validation split in order, each target once, in batches of equal shape.

        Args:
            device_batch: rows of a batch.
            max_rows: stop after that many rows (0: all).
        """
        stop = min(max_rows or self.num_validation_rows, self.num_validation_rows)
        for first in range(0, stop, device_batch):
            numbers = range(first, first + device_batch)
            past = self.num_validation_rows  # any row past the end is padding
            yield self.validation_batch([n if n < stop else past for n in numbers])

    def validation_documents(self) -> Iterator[str]:
        """Yield the texts of the held-out documents, in index order."""
        for number in range(self.validation.documents):
            yield self.tokenizer.decode(self.validation.document(number).tolist())

    @property
    def validation_text_bytes(self) -> int:
        """UTF-8 bytes of all held-out documents."""
        entry = self.index["splits"]["validation"]
        return entry.get("learned", entry)["text_bytes"]

    @property
    def validation_targets(self) -> int:
        """Number of labels of all held-out documents: every token but the first of each.

        In conversations: every learned token.
        """
        entry = self.index["splits"]["validation"]
        every = self.validation.tokens - self.validation.documents
        return entry["learned"]["targets"] if "learned" in entry else every

    def gzip_bits_per_byte(self) -> float:
        """Return bits per byte of `gzip -9` over each held-out document alone."""
        return self.index["splits"]["validation"]["gzip_bits_per_byte"]

    def xz_bits_per_byte(self) -> float | None:
        """Return bits per byte of `xz -9` over the concatenated held-out documents, or None."""
        return self.index["splits"]["validation"]["xz_bits_per_byte"]

    @property
    def no_verdict(self) -> str:
        """Reason why the loss can't be compared with compressors; empty if it can."""
        documents, changed = self.validation.documents, self.index["tokenizer"]["changed"]
        if self.validation.learned:
            return "only answers count, and compressors see whole conversations"
        if documents < MIN_DOCUMENTS:
            return f"{documents} held-out documents are too few, {MIN_DOCUMENTS} are needed"
        if changed:
            return f"the tokenizer changes {changed} of {documents} held-out documents"
        return ""

    @property
    def sample_prompt(self) -> str:
        """Default prompt of a sample: the first words, or question, of a held-out document."""
        return self.index["sample_prompt"]

    @property
    def chat(self) -> ChatTemplate | None:
        """Template of the conversations; None: the documents are plain texts."""
        return ChatTemplate(self.tokenizer) if self.train.learned else None

    def row(self, split: str, number: int) -> TokenRow:
        """Return row `number` of a split; past the last token it holds padding."""
        reader = self.train if split == "train" else self.validation
        start, stop = self._span(reader, number)
        tokens = np.full(self.seq_len + 1, self.tokenizer.specials.pad, np.int64)
        documents = np.full(self.seq_len + 1, reader.documents, np.int64)
        if start < stop:
            tokens[: stop - start] = reader.read(start, stop, f"row {number}")
            documents[: stop - start] = reader.document_ids(start, stop)
        same = documents[1:] == documents[:-1]
        valid_T = same & (documents[1:] < reader.documents)
        if reader.learned and start < stop:
            valid_T[: stop - start - 1] &= reader.learned.read(start + 1, stop, f"row {number}") > 0
        return TokenRow(tokens[:-1], np.where(valid_T, tokens[1:], IGNORED), documents[:-1])

    def _span(self, reader: SplitReader, number: int) -> tuple[int, int]:
        """Return where a row begins in a split and where it ends, its last label included."""
        if reader.learned:
            begins, ends = self._whole[reader.split]
            past = number >= len(begins)
            return (reader.tokens,) * 2 if past else (int(begins[number]), int(ends[number]))
        start = min(number * self.seq_len, reader.tokens)
        return start, min(start + self.seq_len + 1, reader.tokens)

    def describe(self) -> list[str]:
        """Return lines for the header of a run."""
        splits, counts = self.index["splits"], self.index["documents"]
        lines = [f"corpus {self.path} [{self.fingerprint}]: {self.index['source']['description']}"]
        for name, split in splits.items():
            per_token = split["text_bytes"] / split["tokens"]
            lines.append(
                f"  {name}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
                f"{split['text_bytes']:,} bytes ({per_token:.2f} a token)"
            )
        lines.append(
            f"  tokenizer: {self.vocab_size:,} ids, duplicates removed: {counts['duplicates']:,}, "
            f"fill-in-the-middle rate {self.index['arguments']['fim_rate']:g}"
        )
        lines.append(
            f"  rows of {self.seq_len}: {self.rows_per_epoch:,} an epoch, "
            f"{self.num_validation_rows:,} held out"
        )
        if "learned" in splits["train"]:
            begins, ends = self._whole["train"]
            full = (ends - begins).sum() / (len(begins) * (self.seq_len + 1))
            share = splits["train"]["learned"]["targets"] / self.train.tokens
            lines.append(
                f"  conversations: {share:.0%} of the tokens learned, rows {full:.0%} full"
            )
        lines += [f"  {line}" for line in compressor_lines(splits["validation"])]
        return lines

    def _batch(self, numbers: Sequence[int], rows: Sequence[TokenRow]) -> Batch:
        ids_BT, labels_BT, documents_BT = (np.stack(column) for column in zip(*rows, strict=True))
        targets = labels_BT[labels_BT != IGNORED]
        return Batch(
            ids_BT=torch.from_numpy(ids_BT),
            labels_BT=torch.from_numpy(labels_BT),
            docs=Documents.from_ids(torch.from_numpy(documents_BT)),
            target_bytes=int(self.tokenizer.token_bytes_V[targets].sum()),
            num_targets=len(targets),
            rows=tuple(numbers),
        )
