"""Loader of one data rank's microbatches; it counts the global rows that the run has read.

    global rows   p .......... p + b .......... p + 2b ...           b rows a rank
    microbatch    rank 0       rank 1           rank 0 of the next one (2 data ranks)

The position is counted in global rows, so a run that resumes with other ranks, another device batch
or another accumulation continues at the first row that was never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from megacpp.data.batches import Batch
from megacpp.trace_region import region


class TrainingRows(Protocol):
    """Source of rows: a `Corpus` or a `Mixture`."""

    def train_batch(self, rows: Sequence[int], /) -> Batch:
        """Return training rows by global number."""
        ...


class Loader:
    """Iterator over microbatches; only taking a microbatch changes its position.

    From position p, microbatch m of a data rank holds rows `[p + (m * ranks + rank) * b, ... + b)`.
    Any division of the same global rows into ranks and microbatches covers each row once. Ranks
    that process the same rows (tensor, context and pipeline parallel) have the same `rank`. A
    pipeline that takes all microbatches of a step at once keeps its own count of chunks.

    Args:
        corpus: source of rows.
        rank: index among the data ranks.
        ranks: number of data ranks.
        device_batch_size: rows of a microbatch on one rank.
        position: global rows read so far.

    Attributes:
        position: global rows before the next microbatch, equal on every rank.
        microbatches: number taken since construction.
    """

    def __init__(
        self,
        corpus: TrainingRows,
        rank: int,
        ranks: int,
        device_batch_size: int,
        position: int = 0,
    ) -> None:
        assert 0 <= rank < ranks and device_batch_size >= 1 and position >= 0
        self.corpus, self.rank, self.ranks = corpus, rank, ranks
        self.device_batch_size = device_batch_size
        self.position, self.microbatches = position, 0

    @property
    def rows_per_microbatch(self) -> int:
        """Global rows of one microbatch, over all data ranks."""
        return self.ranks * self.device_batch_size

    def take(self, n: int) -> Iterator[Batch]:
        """Yield the next `n` microbatches; each is counted when it is yielded.

        An abandoned iterator has read no further than it was asked to.

        Raises:
            DataError: an unknown id in the corpus; that microbatch isn't counted.
        """
        for _ in range(n):
            first = self.position + self.rank * self.device_batch_size
            with region("data"):
                batch = self.corpus.train_batch(range(first, first + self.device_batch_size))
            self.position += self.rows_per_microbatch
            self.microbatches += 1
            yield batch

    def skip_to(self, rows: int) -> None:
        """Continue at that many global rows, for a resumed run."""
        assert rows >= 0
        self.position = rows
