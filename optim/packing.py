"""Jobs packed into flat buffers: slices of matrices, batches to solve, and this rank's shards.

Legend: K matrices of a batch, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from optim.ownership import Job
from optim.shard_layout import ShardLayout, ShardRegion

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
