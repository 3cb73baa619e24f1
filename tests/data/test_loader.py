"""Loader: it moves by one microbatch at a time; any split of the same rows reads each one once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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


CHANGES = 7  # the step from which `Counted` says that rows come in another order


class Counted:
    """Rows of a corpus, and where each read of them took place."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus, self.reads = corpus, list[tuple[int, int]]()

    def train_batch(self, rows: Sequence[int], /) -> Batch:
        self.reads.append((rows[0], threading.get_ident()))
        return self.corpus.train_batch(rows)

    def changes_at(self, step: int, /) -> bool:
        return step == CHANGES


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


def test_a_batch_that_cannot_be_read_does_not_count(corpus: Corpus) -> None:
    class Damaged(Counted):
        def train_batch(self, rows: Sequence[int], /) -> Batch:
            raise DataError("a foreign id. Fix: none.")

    loader = Loader(Damaged(corpus), 0, 1, 4, position=8)
    with pytest.raises(DataError):
        next(loader.take(1))
    assert (loader.position, loader.microbatches) == (8, 0)


def test_rows_read_ahead_are_those_taken(corpus: Corpus) -> None:
    """Each row is read once, in another thread, and the position stays; a rest is read as ever."""
    source, events = Counted(corpus), list[str]()
    loader = Loader(source, 1, 2, 3, position=12)

    @contextmanager
    def waiting() -> Iterator[None]:
        events.append("waits")
        yield

    with loader.ahead(1, 2, waiting()):
        events.append("block")
    assert events == ["block", "waits"] and (loader.position, loader.microbatches) == (12, 0)
    assert [row for row, _ in source.reads] == [15, 21]
    found = list(loader.take(3))
    expected = [corpus.train_batch(range(n, n + 3)) for n in (15, 21, 27)]
    for one, other in zip(found, expected, strict=True):
        assert one.rows == other.rows and torch.equal(one.ids_BT, other.ids_BT)
    here = [where == threading.get_ident() for _, where in source.reads]
    assert here == [False, False, True] and (loader.position, loader.microbatches) == (30, 3)
    with loader.ahead(CHANGES, 2, waiting()):
        pass
    assert events == ["block", "waits"]


def test_rows_read_ahead_are_dropped_by_another_position(corpus: Corpus) -> None:
    """After a rewind of a mixture a row may be another one: read again."""
    source = Counted(corpus)
    loader = Loader(source, 0, 1, 2)
    with loader.ahead(1, 2, nullcontext()):
        pass
    loader.skip_to(2)
    assert next(loader.take(1)).rows == (2, 3)
    assert [row for row, _ in source.reads] == [0, 2, 2]


def test_an_error_of_a_row_read_ahead_comes_where_it_is_taken(corpus: Corpus) -> None:
    class Damaged(Counted):
        def train_batch(self, rows: Sequence[int], /) -> Batch:
            if rows[0] == 4:
                raise DataError("a foreign id. Fix: none.")
            return corpus.train_batch(rows)

    loader = Loader(Damaged(corpus), 0, 1, 4)
    with loader.ahead(1, 2, nullcontext()):
        pass
    batches = loader.take(2)
    assert next(batches).rows == (0, 1, 2, 3)
    with pytest.raises(DataError):
        next(batches)
    assert (loader.position, loader.microbatches) == (4, 1)


def test_a_block_that_fails_leaves_no_reader_behind(corpus: Corpus) -> None:
    source = Counted(corpus)
    loader = Loader(source, 0, 1, 2)
    with pytest.raises(ZeroDivisionError), loader.ahead(1, 5, nullcontext()):
        raise ZeroDivisionError
    assert len(source.reads) == 5


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
