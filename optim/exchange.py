"""Exchange matrices between the ranks that store them and the ranks that orthogonalise them.

Matrices travel in communication buckets, with two all-to-alls each. Every rank sends its cells of
each matrix to the matrix's owner, packed by owner. The owner stacks matrices of one shape, solves
them, and returns the cells of the results. Nothing is padded. Where replicas hold the same cells,
only the owner's replica sends them and all replicas receive the results, so that each matrix is
solved once.

Let M be the cells of all matrices that travel, sharded evenly over S ranks, with R replicas. Each
rank sends M / (R S) cells to the owners and M / S cells back; 1 / (R S) of both stay on the rank.
Buffers live as long as their bucket: optim/muon.py sets the order, megacpp/memory/forms/muon.py
counts the bytes.

Legend: K matrices of a batch, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from optim.ownership import Job
from optim.packing import (
    JobSlice,
    PackedBuffer,
    RankContext,
    Slices,
    SolveBatch,
    SplitBuffer,
    batches_of,
)
from optim.shard_layout import ShardRegion


class LocalJobs:
    """Matrices that are stored whole on this rank, in their order in a packed buffer.

    Attributes:
        batches: batches to solve.
        pieces: all slices.
        blocks: slices whose momenta are updated together.
        alike: per batch, see `RankContext.alike`.
        cells: total number of cells.
    """

    def __init__(self, jobs: Sequence[Job], rank: RankContext) -> None:
        self.batches = batches_of(jobs, rank.kinds, rank.batch_cells)
        self._sections: list[PackedBuffer] = []
        for batch in self.batches:
            start = self._sections[-1].start + self._sections[-1].cells if self._sections else 0
            self._sections.append(PackedBuffer([rank.here(i, i.region) for i in batch.jobs], start))
        self.pieces = [piece for section in self._sections for piece in section.pieces]
        self.blocks = rank.blocks(self.pieces)
        self.alike = [rank.alike(section.pieces) for section in self._sections]
        self.cells = sum(batch.cells for batch in self.batches)

    def solve(
        self, packed: Tensor, function: Callable[[SolveBatch, Tensor], Tensor]
    ) -> Iterator[tuple[PackedBuffer, list[list[int]], list[Tensor]]]:
        """Yield the slices, their groups (`RankContext.alike`) and the updates of each batch.

        Args:
            packed: `[cells]`, the matrices to orthogonalise.
            function: maps a batch and its matrices `[K, R, C]` to the results `[K, R, C]`.
        """
        for batch, section, alike in zip(self.batches, self._sections, self.alike, strict=True):
            x_KRC = section.view(packed).view(batch.count, batch.rows, batch.cols)
            # Without a local name the yielded updates are freed before the next batch is solved.
            yield section, alike, section.views(function(batch, x_KRC).reshape(-1))


class CommBucket:
    """Matrices that are exchanged by one pair of all-to-alls.

    Attributes:
        sent: this rank's cells of the matrices of each owner, where this rank's replica sends them.
        received: cells of the matrices owned by this rank, from each rank.
        returned: cells of the results, for each rank of every replica.
        arriving: cells of the results that this rank stores, from each owner.
        alike: groups of `arriving`, see `RankContext.alike`.
        batches: matrices owned by this rank.
        blocks: slices of `sent` whose momenta are updated together.
        aside: slices that another replica sends; their momenta are updated without sending.
    """

    def __init__(self, jobs: Sequence[Job], rank: RankContext) -> None:
        ranks, me = range(rank.size), rank.number
        dealt: list[list[Job]] = [[] for _ in ranks]
        for job in jobs:
            dealt[job.owner].append(job)
        # Jobs of a batch are adjacent in every buffer: one copy moves a rank's cells of all.
        batches = [batches_of(some, rank.kinds, rank.batch_cells) for some in dealt]
        owned = [[job for batch in some for job in batch.jobs] for some in batches]
        arriving = [[rank.here(*p) for p in rank.held(some, me)] for some in owned]
        sent = [[p for p in some if rank.supplies(p.job, me)] for some in arriving]
        returned = [[_inside(*p) for p in rank.held(owned[me], r)] for r in ranks]
        received = [[p for p in some if rank.supplies(p.job, r)] for r, some in enumerate(returned)]
        self.sent, self.received = SplitBuffer(sent), SplitBuffer(received)
        self.returned, self.arriving = SplitBuffer(returned), SplitBuffer(arriving)
        self.batches, self.alike = batches[me], rank.alike(self.arriving.pieces)
        self.blocks = rank.blocks(self.sent.pieces)
        self.aside = rank.blocks([p for p in self.arriving.pieces if not rank.supplies(p.job, me)])
        self._sources = runs_of(self.batches, self.received)
        self._targets = runs_of(self.batches, self.returned)

    @property
    def copied(self) -> list[tuple[SolveBatch, int]]:
        """Batches with the cells copied to assemble each; 0 if it arrives contiguous."""
        both = zip(self.batches, self._sources, strict=True)
        return [(batch, batch.cells if len(runs) > 1 else 0) for batch, runs in both]

    def solve(self, arrived: Tensor, function: Callable[[SolveBatch, Tensor], Tensor]) -> Tensor:
        """Solve the matrices owned by this rank and return the results `[N]`, packed by rank.

        Args:
            arrived: `[N]`, the cells of `received`.
            function: maps a batch and its matrices `[K, R, C]` to the results `[K, R, C]`.
        """
        back = arrived.new_empty(self.returned.cells)
        for batch, arriving, leaving in zip(
            self.batches, self._sources, self._targets, strict=True
        ):
            o_KRC = function(batch, _assembled(batch, arriving, arrived))
            for run in leaving:
                run.there(back).copy_(run.here(o_KRC))
            del o_KRC  # free it before the next batch is solved
        return back


class CopyRun(NamedTuple):
    """Equal slices of consecutive jobs of a batch that are adjacent in a buffer.

    One copy moves all of them.

    Attributes:
        start, past: range of cells in the buffer.
        first, last: range of matrices in the batch.
        jobs: shape of one job.
        where: slices of the cells in each job; None selects all.
        shape: shape of one slice.
    """

    start: int
    past: int
    first: int
    last: int
    jobs: tuple[int, ...]
    where: Slices | None
    shape: tuple[int, ...]

    def there(self, buffer: Tensor) -> Tensor:
        """View the run in the buffer, as `[n, *shape]`.

        Args:
            buffer: `[N]`.
        """
        return buffer[self.start : self.past].view(-1, *self.shape)

    def here(self, x_KRC: Tensor) -> Tensor:
        """View the run in the batch, as `[n, *shape]`.

        Args:
            x_KRC: all matrices of the batch.
        """
        jobs = x_KRC[self.first : self.last].reshape(-1, *self.jobs)
        return jobs if self.where is None else jobs[(slice(None), *self.where)]

    def with_next(self, other: CopyRun) -> CopyRun | None:
        """Return both runs as one if `other` follows in buffer and batch, otherwise None."""
        beside = (self.past, self.last, *self[4:]) == (other.start, other.first, *other[4:])
        return self._replace(past=other.past, last=other.last) if beside else None


def runs_of(batches: Sequence[SolveBatch], split: SplitBuffer) -> list[list[CopyRun]]:
    """Return, per batch, the fewest copies between it and a buffer packed by rank."""
    places: dict[int, tuple[int, int]] = {}  # id of a job: its batch, and its first matrix
    for number, batch in enumerate(batches):
        firsts = accumulate(batch.counts, initial=0)
        places |= {id(job): (number, a) for job, a in zip(batch.jobs, firsts, strict=False)}
    found: list[list[CopyRun]] = [[] for _ in batches]
    past = 0
    for job, _, where, shape, size in split.pieces:
        number, first = places[id(job)]
        start, past = past, past + size
        run, runs = (
            CopyRun(start, past, first, first + job.count, job.region.shape, where, shape),
            found[number],
        )
        joined = runs[-1].with_next(run) if runs else None
        if joined:
            runs[-1] = joined
        else:
            runs.append(run)
    return found


def _assembled(batch: SolveBatch, runs: Sequence[CopyRun], arrived: Tensor) -> Tensor:
    """Assemble the matrices of a batch, `[K, R, C]`; a single run is returned as a view."""
    shape = batch.count, batch.rows, batch.cols
    if len(runs) == 1:
        return runs[0].there(arrived).view(shape)
    x_KRC = arrived.new_empty(shape)
    for run in runs:
        run.here(x_KRC).copy_(run.there(arrived))
    return x_KRC


class AsyncAllToAll:
    """All-to-all in progress; frees the send buffer in `wait`.

    Args:
        packed: `[N]`, cells to send.
        leaving: splits of the sent cells.
        arriving: splits of the received cells.
        group: process group.
    """

    def __init__(
        self,
        packed: Tensor,
        leaving: SplitBuffer,
        arriving: SplitBuffer,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._packed: Tensor | None = packed
        self._arrived: Tensor | None = packed.new_empty(arriving.cells)
        self._work = dist.all_to_all_single(
            self._arrived, packed, arriving.splits, leaving.splits, group, async_op=True
        )

    def wait(self) -> Tensor:
        """Wait for the exchange and return the received cells, `[N]`."""
        arrived = self._arrived
        assert self._work is not None and arrived is not None, "waited for already"
        self._work.wait()
        self._work = self._packed = self._arrived = None
        return arrived


def _inside(job: Job, region: ShardRegion) -> JobSlice:
    """Return the slice that selects `region` in a tensor of the whole job."""
    where = None if region == job.region else region.slices_in(job.region)
    return JobSlice(job, region, where, region.shape, region.size)
