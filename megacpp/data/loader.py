"""Microbatches of one data rank, and how far the run has read.

    global rows   p .......... p + b .......... p + 2b ...           b rows a rank
    microbatch    rank 0       rank 1           rank 0 of the next one (2 data ranks)

The position is counted in global rows, so that a run which goes on with other ranks, another
device batch or another accumulation reads on at the first row that was never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from megacpp.data.batches import Batch
from megacpp.run.profiling import region


class TrainingRows(Protocol):
    """Where rows come from: a `Corpus`."""

    def train_batch(self, rows: Sequence[int], /) -> Batch: ...


class Loader:
    """Takes microbatches one by one; nothing but taking one moves it.

    Microbatch m from a position p on holds rows `[p + (m * ranks + rank) * b, ... + b)` on a data
    rank: any split of the same global rows into ranks and microbatches covers each row once.
    Ranks that work on the same rows (tensor, context and pipeline parallel) have the same `rank`.
    A pipeline that is handed all microbatches of a step at once keeps its own count of chunks.

    Attributes:
        position: global rows before the next microbatch, the same on every rank.
        microbatches: taken since this object was made.
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
        """Yields the next `n` microbatches; one counts when it is handed over, not before.

        An iterator that is left behind has read no further than it was asked to.

        Raises:
            DataError: a foreign id in the corpus; that microbatch isn't counted.
        """
        for _ in range(n):
            first = self.position + self.rank * self.device_batch_size
            with region("data"):
                batch = self.corpus.train_batch(range(first, first + self.device_batch_size))
            self.position += self.rows_per_microbatch
            self.microbatches += 1
            yield batch

    def skip_to(self, rows: int) -> None:
        """Goes on at that many global rows, for a resumed run."""
        assert rows >= 0
        self.position = rows
