"""Plan of the slices that each rank packs, sends and solves in a step (optim/exchange.py)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from optim.exchange import (
    CommBucket,
    CopyRun,
    JobSlice,
    LocalJobs,
    PackedBuffer,
    SolveBatch,
    SplitBuffer,
)
from optim.ownership import Job
from optim.shard_layout import ShardLayout, ShardRegion


@dataclass(frozen=True)
class MatrixKind:
    """Properties that must be equal for matrices to be processed together.

    Attributes:
        pack: key of matrices whose momenta are updated together.
        solve: number of Newton-Schulz steps and their coefficients.
    """

    pack: Hashable
    solve: Any


def batches_of(
    jobs: Sequence[Job], kinds: Mapping[int, MatrixKind], most_cells: int
) -> list[SolveBatch]:
    """Group jobs of equal shapes and solvers into batches of at most `most_cells` cells.

    A job larger than that is a batch of its own.
    """
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
    """Position of this process in a group of ranks, and the parameters' layouts there.

    Attributes:
        number: index of this process in the group.
        size: number of ranks of the group.
        layouts: shard layout per parameter.
        kinds: matrix kind per parameter.
        batch_cells: most cells of a batch, unless it is a single job.
        block_cells: most cells of a block, unless it is a single slice; the momenta of a block are
            updated together.
        dims: 2 for parameters `[R, C]`; parameters that are missing are `[E, R, C]`.
    """

    number: int
    size: int
    layouts: Mapping[int, ShardLayout]
    kinds: Mapping[int, MatrixKind]
    batch_cells: int
    block_cells: int
    dims: Mapping[int, int] = field(default_factory=dict)

    def blocks(self, pieces: Sequence[JobSlice]) -> list[PackedBuffer]:
        """Split consecutive slices into blocks of one kind and at most `block_cells` cells."""
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
        """Return the indices of slices, grouped by kind and shape: their updates scale alike."""
        found: dict[Any, list[int]] = {}
        for i, (job, *_) in enumerate(pieces):
            key = (self.kinds[job.parameter].pack, job.rows, job.cols)
            found.setdefault(key, []).append(i)
        return list(found.values())

    def here(self, job: Job, region: ShardRegion) -> JobSlice:
        """Return the slice of a job that selects `region` in this rank's shard."""
        part = self.layouts[job.parameter].regions[self.number]
        first = 3 - self.dims.get(job.parameter, 3)
        where = None if part == region else region.slices_in(part)[first:]
        return JobSlice(job, region, where, region.shape[first:], region.size)

    def held(self, jobs: Sequence[Job], rank: int) -> list[tuple[Job, ShardRegion]]:
        """Return the non-empty regions of `jobs` that `rank` holds, in order."""
        met = [
            (job, self.layouts[job.parameter].regions[rank].intersection(job.region))
            for job in jobs
        ]
        return [(job, region) for job, region in met if region is not None]

    def supplies(self, job: Job, rank: int) -> bool:
        """Return whether `rank` is in the replica that sends to the owner of `job`."""
        layout = self.layouts[job.parameter]
        return layout.replica(rank) == layout.replica(job.owner)


def local_jobs(jobs: Sequence[Job], rank: RankContext) -> LocalJobs:
    """Return the plan of jobs that are whole on this rank."""
    batches = batches_of(jobs, rank.kinds, rank.batch_cells)
    starts = accumulate((batch.cells for batch in batches), initial=0)
    sections = [
        PackedBuffer([rank.here(job, job.region) for job in batch.jobs], start)
        for batch, start in zip(batches, starts, strict=False)
    ]
    pieces = [piece for section in sections for piece in section.pieces]
    alike = [rank.alike(section.pieces) for section in sections]
    return LocalJobs(batches, sections, rank.blocks(pieces), alike)


def comm_bucket(jobs: Sequence[Job], rank: RankContext) -> CommBucket:
    """Return this rank's part of the exchange of jobs."""
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
    pieces = [p for some in arriving for p in some]
    buffers = [SplitBuffer(by_rank) for by_rank in (sent, received, returned, arriving)]
    return CommBucket(
        *buffers,
        alike=rank.alike(pieces),
        batches=batches[me],
        sources=runs_of(batches[me], buffers[1]),
        targets=runs_of(batches[me], buffers[2]),
        blocks=rank.blocks(buffers[0].pieces),
        aside=rank.blocks([p for p in pieces if not rank.supplies(p.job, me)]),
    )


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
        if runs and _follows(run, runs[-1]):
            runs[-1] = runs[-1]._replace(past=run.past, last=run.last)
        else:
            runs.append(run)
    return found


def _follows(run: CopyRun, other: CopyRun) -> bool:
    """Return whether a run of the same cells follows another in buffer and batch."""
    return (other.past, other.last, *other[4:]) == (run.start, run.first, *run[4:])


def _inside(job: Job, region: ShardRegion) -> JobSlice:
    """Return the slice that selects `region` in a tensor of the whole job."""
    where = None if region == job.region else region.slices_in(job.region)
    return JobSlice(job, region, where, region.shape, region.size)
