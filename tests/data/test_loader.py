"""Loader: it moves by one microbatch at a time; any split of the same rows reads each one once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp.config.batch_schedule import BatchSchedule
from megacpp.data.batches import Batch
from megacpp.data.corpus import Corpus
from megacpp.data.loader import Loader
from megacpp.errors import DataError
from parallel.mesh import World
from tests.figures import Record
from tests.synthetic import micro_rows

# Data ranks, rows per rank and microbatch, microbatches: 24 rows a step.
CUTS = [(1, 24, 1), (1, 1, 24), (1, 4, 6), (2, 3, 4), (3, 2, 4), (4, 6, 1), (2, 12, 1), (8, 1, 3)]
ROWS = 24


@pytest.fixture(scope="module")
def corpus(corpus_path: Path) -> Corpus:
    return Corpus(corpus_path, 37, seed=3)


def world_of(rank: int, ranks: int) -> World:
    """Return a position along `batch`, without a process group."""
    batch: Any = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
    return World(rank, ranks, torch.device("cpu"), {"batch": batch})


def loaders(corpus: Corpus, ranks: int, device_batch: int, position: int = 0) -> list[Loader]:
    return [Loader(corpus, rank, ranks, device_batch, position) for rank in range(ranks)]


def rows_of(batches: Sequence[Batch]) -> list[int]:
    return [row for batch in batches for row in batch.rows]


@pytest.mark.parametrize(("ranks", "device_batch", "accum"), CUTS)
def test_equal_steps_are_the_rows_of_the_step(
    ranks: int, device_batch: int, accum: int, corpus: Corpus
) -> None:
    """Batch for batch what `micro_rows` makes of the rows of a step, over the end of an epoch."""
    first = corpus.rows_per_epoch // ROWS - 1
    steps = (*range(3), *range(first, first + 3))
    assert steps[0] < corpus.rows_per_epoch < (steps[-1] + 1) * ROWS
    for rank, loader in enumerate(loaders(corpus, ranks, device_batch)):
        for step in steps:
            loader.skip_to(step * ROWS)
            rows = range(step * ROWS, (step + 1) * ROWS)
            shares = micro_rows(rows, world_of(rank, ranks), device_batch)
            batches = list(loader.take(accum))
            assert [batch.rows for batch in batches] == [tuple(share) for share in shares]
            for batch, share in zip(batches, shares, strict=True):
                expected = corpus.train_batch(share)
                assert torch.equal(batch.ids_BT, expected.ids_BT)
                assert torch.equal(batch.labels_BT, expected.labels_BT)
            assert loader.position == rows.stop
        assert loader.microbatches == accum * len(steps)


@pytest.mark.parametrize(("ranks", "device_batch", "accum"), CUTS)
def test_any_cut_reads_each_row_once(
    ranks: int, device_batch: int, accum: int, corpus: Corpus, record_property: Record
) -> None:
    """Two epochs and a part, from the middle of the first one on."""
    steps = range(2 * corpus.rows_per_epoch // ROWS + 1)
    seen = Counter[int]()
    for loader in loaders(corpus, ranks, device_batch, position=5):
        for _ in steps:
            seen.update(rows_of(list(loader.take(accum))))
    assert seen == Counter(range(5, 5 + ROWS * len(steps)))
    n = corpus.rows_per_epoch
    epochs = Counter(corpus.split_row(row) for row in seen if n <= row < 2 * n)
    assert epochs == Counter(range(n))
    record_property("rows read once over two epochs", len(seen))


def test_the_position_follows_each_microbatch(corpus: Corpus) -> None:
    loader = Loader(corpus, rank=1, ranks=2, device_batch_size=3, position=12)
    batches = loader.take(5)
    assert (loader.position, loader.microbatches) == (12, 0)
    for k in range(1, 6):
        assert next(batches).rows == (12 + 6 * k - 3, 12 + 6 * k - 2, 12 + 6 * k - 1)
        assert (loader.position, loader.microbatches) == (12 + 6 * k, k)
    assert next(batches, None) is None and loader.microbatches == 5
    assert list(loader.take(0)) == [] and loader.position == 42


def test_an_abandoned_iterator_has_read_what_was_taken(corpus: Corpus) -> None:
    loader = Loader(corpus, 0, 2, 2)
    abandoned = loader.take(8)
    assert rows_of(list(islice(abandoned, 3))) == [0, 1, 4, 5, 8, 9]
    abandoned.close()  # type: ignore[attr-defined]
    loader.take(4)  # never asked
    assert (loader.position, loader.microbatches) == (12, 3)
    one, other = loader.take(2), loader.take(2)
    order = [next(one), next(other), next(other), next(one)]
    assert [batch.rows[0] for batch in order] == [12, 16, 20, 24]


def test_a_batch_that_cannot_be_read_does_not_count() -> None:
    class Damaged:
        def train_batch(self, rows: Sequence[int], /) -> Batch:
            raise DataError("a foreign id. Fix: none.")

    loader = Loader(Damaged(), 0, 1, 4, position=8)
    with pytest.raises(DataError):
        next(loader.take(1))
    assert (loader.position, loader.microbatches) == (8, 0)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_pipeline_keeps_its_own_count(chunks: int, corpus: Corpus) -> None:
    """All microbatches of a step are handed over at once; however they are cut on, k are k."""
    loader, counted = Loader(corpus, 0, 2, 4), 0
    for step in range(1, 4):
        handed = list(loader.take(3))
        counted += sum(len(batch.ids_BT.chunk(chunks)) for batch in handed)
        assert loader.microbatches == 3 * step and loader.position == 24 * step
    assert counted == loader.microbatches * chunks


@pytest.mark.parametrize("stop", [1, 4, 11])
def test_resume_goes_on_at_the_next_row(stop: int, corpus: Corpus, record_property: Record) -> None:
    """Another accumulation, device batch and number of ranks: no row is lost, none comes twice."""
    before = loaders(corpus, 2, 3)
    seen = [row for loader in before for row in rows_of(list(loader.take(stop)))]
    positions = {loader.position for loader in before}
    assert positions == {6 * stop}
    for ranks, device_batch, accum in CUTS:
        after = loaders(corpus, ranks, device_batch)
        rest: list[int] = []
        for loader in after:
            loader.skip_to(*positions)
            assert loader.microbatches == 0
            rest += rows_of(list(loader.take(2 * accum)))
        assert sorted(seen + rest) == list(range(6 * stop + 2 * ROWS))
    record_property("resumes on other ranks, no row lost or read twice", len(CUTS))


@pytest.mark.parametrize(("ranks", "device_batch"), [(1, 6), (2, 3), (6, 1)])
def test_a_batch_warmup_reads_the_rows_of_its_schedule(
    ranks: int, device_batch: int, corpus: Corpus
) -> None:
    schedule = BatchSchedule(ranks * device_batch, grad_accum=9, warmup_steps=5)
    all_ranks = loaders(corpus, ranks, device_batch)
    for step in range(8):
        taken = [b for loader in all_ranks for b in loader.take(schedule.accum(step))]
        assert sorted(rows_of(taken)) == list(schedule.rows(step))
        assert {loader.position for loader in all_ranks} == {schedule.rows_before(step + 1)}
