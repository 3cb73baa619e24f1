"""A wave of matrices on its way to their owners and back: two all-to-alls, packed by region.

Every rank sends its cells of each matrix to the owner, packed by owner; the owner puts matrices of
one shape together, has them solved, and returns the cells of the results. Nothing is padded. Where
replicas hold the same cells, the owner's own replica sends them, and all replicas get the results,
so the work of a matrix is done once.

Cells that cross the wire, per rank, of the M cells of all matrices that move, on S ranks that cut
them evenly and R replicas: M / (R S) to the owners and M / S back, of which 1 / (R S) is the rank's
own. Buffers live as long as the wave: optim/muon.py says when, megacpp/memory/forms/muon.py how
much.

Legend: K matrices of a batch, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from optim.ownership import Job
from optim.shard_layout import ShardLayout, ShardRegion

Slices = tuple[slice, ...]


class JobSlice(NamedTuple):
    """Cells of an item that one rank holds.

    Attributes:
        where: among what it is cut from (a rank's part, or the item); None: all of it.
        shape: of what is cut out; a part of a parameter `[R, C]` has no leading 1.
        size: number of cells.
    """

    job: Job
    region: ShardRegion
    where: Slices | None
    shape: tuple[int, ...]
    size: int

    def take(self, whole: Tensor) -> Tensor:
        """These cells of what the piece is cut from."""
        return whole if self.where is None else whole[self.where]


class PackedBuffer:
    """Pieces that lie one after the other in a flat buffer.

    Attributes:
        start: the first cell.
        cells: of all pieces.
    """

    def __init__(self, pieces: Sequence[JobSlice], start: int = 0) -> None:
        self.pieces, self.start = list(pieces), start
        self._sizes = [piece.size for piece in pieces]
        self.cells = sum(self._sizes)

    def view(self, buffer: Tensor) -> Tensor:
        """What of a buffer these pieces are."""
        return buffer[self.start : self.start + self.cells]

    def views(self, cells: Tensor) -> list[Tensor]:
        """Every piece, of a flat tensor that holds these pieces alone."""
        if not self.pieces:
            return []
        parts = cells.split(self._sizes)
        return [x.view(piece.shape) for x, piece in zip(parts, self.pieces, strict=True)]


class SplitBuffer(PackedBuffer):
    """Pieces for, or from, every rank.

    Attributes:
        splits: cells of each rank.
    """

    def __init__(self, by_rank: Sequence[Sequence[JobSlice]]) -> None:
        super().__init__([piece for some in by_rank for piece in some])
        self.splits = [sum(piece.size for piece in some) for some in by_rank]


class SolveBatch:
    """Items of one shape that are solved together.

    Attributes:
        counts: matrices of each item.
    """

    def __init__(self, jobs: Sequence[Job], rows: int, cols: int, solver: Any) -> None:
        self.jobs, self.rows, self.cols, self.solver = tuple(jobs), rows, cols, solver
        self.counts = [job.count for job in jobs]
        self.count = sum(self.counts)
        self.cells = self.count * rows * cols


@dataclass(frozen=True)
class MatrixKind:
    """What must agree: `pack` for momenta to move together, `solve` for matrices to be solved so.

    Attributes:
        solve: steps and coefficients of Newton-Schulz.
    """

    pack: Hashable
    solve: Any


def batches_of(
    jobs: Sequence[Job], kinds: Mapping[int, MatrixKind], most_cells: int
) -> list[SolveBatch]:
    """Items of equal shapes together, as long as they have at most `most_cells`."""
    alike: dict[Any, list[list[Job]]] = {}
    for job in jobs:
        key = (job.rows, job.cols, kinds[job.parameter].solve)
        groups = alike.setdefault(key, [[]])
        if groups[-1] and sum(i.region.size for i in groups[-1]) + job.region.size > most_cells:
            groups.append([])
        groups[-1].append(job)
    return [SolveBatch(group, *key) for key, groups in alike.items() for group in groups]


@dataclass(frozen=True)
class RankContext:
    """This process in a group of ranks, and where the cells of parameters (by number) are there.

    Attributes:
        batch_cells: most of a batch, unless it is one item.
        block_cells: most of a block, unless it is one piece: whose momenta move together.
        dims: 2 for a parameter `[R, C]`; others are `[E, R, C]`.
    """

    number: int
    size: int
    layouts: Mapping[int, ShardLayout]
    kinds: Mapping[int, MatrixKind]
    batch_cells: int
    block_cells: int
    dims: Mapping[int, int] = field(default_factory=dict)

    def blocks(self, pieces: Sequence[JobSlice]) -> list[PackedBuffer]:
        """Runs of pieces of one kind."""
        kinds = [self.kinds[piece.job.parameter].pack for piece in pieces]
        blocks: list[list[JobSlice]] = []
        cells = 0
        for i, piece in enumerate(pieces):
            cells += piece.size
            if not i or cells > self.block_cells or kinds[i] != kinds[i - 1]:
                blocks.append([])
                cells = piece.size
            blocks[-1].append(piece)
        sizes = [sum(piece.size for piece in block) for block in blocks]
        starts = accumulate(sizes, initial=0)
        return [PackedBuffer(block, start) for block, start in zip(blocks, starts, strict=False)]

    def alike(self, pieces: Sequence[JobSlice]) -> list[list[int]]:
        """Numbers of the pieces whose weights get updates of one size."""
        found: dict[Any, list[int]] = {}
        for i, (job, *_) in enumerate(pieces):
            key = (self.kinds[job.parameter].pack, job.rows, job.cols)
            found.setdefault(key, []).append(i)
        return list(found.values())

    def here(self, job: Job, region: ShardRegion) -> JobSlice:
        """Cells of this rank's part of a parameter."""
        part = self.layouts[job.parameter].regions[self.number]
        first = 3 - self.dims.get(job.parameter, 3)
        where = None if part == region else region.slices_in(part)[first:]
        return JobSlice(job, region, where, region.shape[first:], region.size)

    def held(self, jobs: Sequence[Job], rank: int) -> list[tuple[Job, ShardRegion]]:
        """The cells of `jobs` that `rank` holds, in order; items without any are left out."""
        met = [
            (job, self.layouts[job.parameter].regions[rank].intersection(job.region))
            for job in jobs
        ]
        return [(job, region) for job, region in met if region is not None]

    def supplies(self, job: Job, rank: int) -> bool:
        """The cells of `rank` are those that the owner of `job` gets."""
        layout = self.layouts[job.parameter]
        return layout.replica(rank) == layout.replica(job.owner)


class LocalJobs:
    """Matrices that are whole on this rank, in the order in which they lie in a buffer.

    Attributes:
        alike: see `RankContext.alike`.
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
        """Of every batch: its pieces, which of them are alike, and `function` of each."""
        for batch, section, alike in zip(self.batches, self._sections, self.alike, strict=True):
            x_KRC = section.view(packed).view(batch.count, batch.rows, batch.cols)
            # Without a name here, what was yielded goes before the next batch is solved.
            yield section, alike, section.views(function(batch, x_KRC).reshape(-1))


class CommBucket:
    """Matrices that travel together.

    Attributes:
        sent: this rank's cells of the matrices of each owner, as far as its replica supplies them.
        received: each rank's cells of the matrices owned here.
        returned: the same, of every replica.
        arriving: this rank's cells of the matrices of each owner, all.
        alike: of these; see `RankContext.alike`.
        batches: the matrices owned here.
        blocks: of the pieces that are sent.
        aside: this rank's cells that another replica sends.
    """

    def __init__(self, jobs: Sequence[Job], rank: RankContext) -> None:
        ranks, me = range(rank.size), rank.number
        dealt: list[list[Job]] = [[] for _ in ranks]
        for job in jobs:
            dealt[job.owner].append(job)
        # Items of a batch lie side by side in every buffer: one copy moves what ranks hold of them.
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
        """The batches, and how many cells of each are put together first."""
        both = zip(self.batches, self._sources, strict=True)
        return [(batch, batch.cells if len(runs) > 1 else 0) for batch, runs in both]

    def solve(self, arrived: Tensor, function: Callable[[SolveBatch, Tensor], Tensor]) -> Tensor:
        """What goes back: `function` of each batch of matrices, in regions by rank."""
        back = arrived.new_empty(self.returned.cells)
        for batch, arriving, leaving in zip(
            self.batches, self._sources, self._targets, strict=True
        ):
            o_KRC = function(batch, _assembled(batch, arriving, arrived))
            for run in leaving:
                run.there(back).copy_(run.here(o_KRC))
            del o_KRC  # not to be alive while the next batch is solved
        return back


class CopyRun(NamedTuple):
    """Equal regions of consecutive items of a batch that lie side by side in a buffer.

    Attributes:
        start, past: cells of the buffer.
        first, last: matrices of the batch, from `first` to before `last`.
        items: shape of one item.
        where: in each item; None: all.
        shape: of one region.
    """

    start: int
    past: int
    first: int
    last: int
    jobs: tuple[int, ...]
    where: Slices | None
    shape: tuple[int, ...]

    def there(self, buffer: Tensor) -> Tensor:
        """The regions in the buffer, one after the other."""
        return buffer[self.start : self.past].view(-1, *self.shape)

    def here(self, x_KRC: Tensor) -> Tensor:
        """The regions in the batch, likewise."""
        jobs = x_KRC[self.first : self.last].reshape(-1, *self.jobs)
        return jobs if self.where is None else jobs[(slice(None), *self.where)]

    def with_next(self, other: CopyRun) -> CopyRun | None:
        """Both as one, if the other comes next on either side and is alike."""
        beside = (self.past, self.last, *self[4:]) == (other.start, other.first, *other[4:])
        return self._replace(past=other.past, last=other.last) if beside else None


def runs_of(batches: Sequence[SolveBatch], split: SplitBuffer) -> list[list[CopyRun]]:
    """Where the regions of each batch's matrices are in a buffer, in as few runs as can be."""
    places: dict[int, tuple[int, int]] = {}  # of items, by id: their batch, and the first matrix
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
    """The matrices of a batch from their regions, `[K, R, C]`; no copy of a single run."""
    shape = batch.count, batch.rows, batch.cols
    if len(runs) == 1:
        return runs[0].there(arrived).view(shape)
    x_KRC = arrived.new_empty(shape)
    for run in runs:
        run.here(x_KRC).copy_(run.there(arrived))
    return x_KRC


class AsyncAllToAll:
    """An all-to-all under way; `wait` for what arrives, after which what was sent is let go."""

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
        arrived = self._arrived
        assert self._work is not None and arrived is not None, "waited for already"
        self._work.wait()
        self._work = self._packed = self._arrived = None
        return arrived


def _inside(job: Job, region: ShardRegion) -> JobSlice:
    """Cells of an item, placed within it."""
    where = None if region == job.region else region.slices_in(job.region)
    return JobSlice(job, region, where, region.shape, region.size)
