"""Loader of one data rank's microbatches; it counts the global rows that the run has read.

    global rows   p .......... p + b .......... p + 2b ...           b rows a rank
    microbatch    rank 0       rank 1           rank 0 of the next one (2 data ranks)

The position is counted in global rows, so a run that resumes with other ranks, another device batch
or another accumulation continues at the first row that was never read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from megacpp.data.batches import Batch
from megacpp.data.corpus import Corpus
from megacpp.data.mixture import Mixture
from megacpp.torch_extras import region


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
        corpus: Corpus | Mixture,
        rank: int,
        ranks: int,
        device_batch_size: int,
        position: int = 0,
    ) -> None:
        assert 0 <= rank < ranks and device_batch_size >= 1 and position >= 0
        self.corpus, self.rank, self.ranks = corpus, rank, ranks
        self.device_batch_size = device_batch_size
        self.position, self.microbatches = position, 0
        self._ahead: dict[int, Batch] = {}  # by the position that they are taken at
        self._reader = ThreadPoolExecutor(1)  # starts its thread when it is first used

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
            with region("data"):
                batch = self._ahead.pop(self.position, None) or self._read(self.position)
            self.position += self.rows_per_microbatch
            self.microbatches += 1
            yield batch

    @contextlib.contextmanager
    def ahead(
        self, step: int, n: int, waiting: contextlib.AbstractContextManager[None]
    ) -> Iterator[None]:
        """Read the microbatches of the next step in a thread while a block waits for the device.

        The block must not read the corpus. `take` yields what was read; what could not be read it
        reads again, so an error is raised where that microbatch is taken.

        Args:
            step: number of the next step; nothing is read if rows then come in another order.
            n: number of its microbatches.
            waiting: entered while the thread isn't done after the block.
        """
        n = 0 if self.corpus.changes_at(step) else n
        places = [self.position + m * self.rows_per_microbatch for m in range(n)]

        def read() -> None:
            with contextlib.suppress(Exception):
                for place in places:
                    self._ahead[place] = self._read(place)

        reading = self._reader.submit(read) if places else None
        try:
            yield
        finally:
            if reading is not None:
                with waiting:
                    reading.result()

    def skip_to(self, rows: int) -> None:
        """Continue at that many global rows, for a resumed run."""
        assert rows >= 0
        self.position = rows
        self._ahead.clear()

    def _read(self, position: int) -> Batch:
        """Return this rank's rows of the microbatch at a global row."""
        first = position + self.rank * self.device_batch_size
        return self.corpus.train_batch(range(first, first + self.device_batch_size))
