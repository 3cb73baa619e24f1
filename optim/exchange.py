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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from optim.ownership import Job
from optim.shard_layout import ShardRegion

Slices = tuple[slice, ...]


class JobSlice(NamedTuple):
    """Cells of a job that one rank holds.

    Attributes:
        job: matrices that the cells belong to.
        region: cells in the parameter.
        where: slices that select the cells in the tensor that holds them; None selects all of it.
        shape: shape of the selected cells; `[R, C]` for a 2-D parameter, without a leading 1.
        size: number of cells.
    """

    job: Job
    region: ShardRegion
    where: Slices | None
    shape: tuple[int, ...]
    size: int

    def take(self, whole: Tensor) -> Tensor:
        """Return a view of these cells.

        Args:
            whole: tensor that holds the cells, of any shape that `where` indexes.
        """
        return whole if self.where is None else whole[self.where]


class PackedBuffer:
    """Job slices that are packed one after the other in a flat buffer.

    Attributes:
        pieces: the slices, in order.
        start: offset of the first cell in the buffer.
        cells: total number of cells.
    """

    def __init__(self, pieces: Sequence[JobSlice], start: int = 0) -> None:
        self.pieces, self.start = list(pieces), start
        self._sizes = [piece.size for piece in pieces]
        self.cells = sum(self._sizes)

    def view(self, buffer: Tensor) -> Tensor:
        """Return the part of the flat buffer `[N]` that holds these slices.

        Args:
            buffer: `[N]`, at least `start + cells` long.
        """
        return buffer[self.start : self.start + self.cells]

    def views(self, cells: Tensor) -> list[Tensor]:
        """Return one view per slice.

        Args:
            cells: `[self.cells]`, these slices alone.
        """
        if not self.pieces:
            return []
        parts = cells.split(self._sizes)
        return [x.view(piece.shape) for x, piece in zip(parts, self.pieces, strict=True)]


class SplitBuffer(PackedBuffer):
    """Packed buffer of an all-to-all: slices for, or from, each rank.

    Attributes:
        splits: number of cells per rank.
    """

    def __init__(self, by_rank: Sequence[Sequence[JobSlice]]) -> None:
        super().__init__([piece for some in by_rank for piece in some])
        self.splits = [sum(piece.size for piece in some) for some in by_rank]


class SolveBatch:
    """Jobs with matrices of one shape that are solved together.

    Attributes:
        jobs: the jobs, in the order of the batch.
        counts: number of matrices per job.
        count: number of matrices.
        cells: total number of cells.
    """

    def __init__(self, jobs: Sequence[Job], rows: int, cols: int, solver: Any) -> None:
        self.jobs, self.rows, self.cols, self.solver = tuple(jobs), rows, cols, solver
        self.counts = [job.count for job in jobs]
        self.count = sum(self.counts)
        self.cells = self.count * rows * cols


@dataclass(frozen=True)
class LocalJobs:
    """Matrices that are stored whole on this rank, in their order in a packed buffer.

    Attributes:
        batches: batches to solve.
        sections: slices of each batch.
        blocks: slices whose momenta are updated together.
        alike: per batch, see `RankContext.alike`.
    """

    batches: list[SolveBatch]
    sections: list[PackedBuffer]
    blocks: list[PackedBuffer]
    alike: list[list[list[int]]]

    @property
    def cells(self) -> int:
        """Total number of cells."""
        return sum(batch.cells for batch in self.batches)

    def solve(
        self, packed: Tensor, function: Callable[[SolveBatch, Tensor], Tensor]
    ) -> Iterator[tuple[PackedBuffer, list[list[int]], list[Tensor]]]:
        """Yield the slices, their groups (`RankContext.alike`) and the updates of each batch.

        Args:
            packed: `[cells]`, the matrices to orthogonalise.
            function: maps a batch and its matrices `[K, R, C]` to the results `[K, R, C]`.
        """
        for batch, section, alike in zip(self.batches, self.sections, self.alike, strict=True):
            x_KRC = section.view(packed).view(batch.count, batch.rows, batch.cols)
            # Without a local name the yielded updates are freed before the next batch is solved.
            yield section, alike, section.views(function(batch, x_KRC).reshape(-1))


@dataclass(frozen=True)
class CommBucket:
    """Matrices that are exchanged by one pair of all-to-alls.

    Attributes:
        sent: this rank's cells of the matrices of each owner, where this rank's replica sends them.
        received: cells of the matrices owned by this rank, from each rank.
        returned: cells of the results, for each rank of every replica.
        arriving: cells of the results that this rank stores, from each owner.
        alike: groups of `arriving`, see `RankContext.alike`.
        batches: matrices owned by this rank.
        sources, targets: copies between each batch and `received`, and `returned`.
        blocks: slices of `sent` whose momenta are updated together.
        aside: slices that another replica sends; their momenta are updated without sending.
    """

    sent: SplitBuffer
    received: SplitBuffer
    returned: SplitBuffer
    arriving: SplitBuffer
    alike: list[list[int]]
    batches: list[SolveBatch]
    sources: list[list[CopyRun]]
    targets: list[list[CopyRun]]
    blocks: list[PackedBuffer]
    aside: list[PackedBuffer]

    def solve(self, arrived: Tensor, function: Callable[[SolveBatch, Tensor], Tensor]) -> Tensor:
        """Solve the matrices owned by this rank and return the results `[N]`, packed by rank.

        Args:
            arrived: `[N]`, the cells of `received`.
            function: maps a batch and its matrices `[K, R, C]` to the results `[K, R, C]`.
        """
        back = arrived.new_empty(self.returned.cells)
        each = zip(self.batches, self.sources, self.targets, strict=True)
        for batch, arriving, leaving in each:
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
