"""Assign each matrix of a sharded parameter to the rank that orthogonalises it.

Meshes shard parameters into regions (optim/shard_layout.py), but Newton-Schulz needs whole
matrices. Every rank computes the same plan from shapes alone. Each matrix that is spread over
several ranks gets one owner: over all matrices of a process group, the costliest matrix first, to
the rank with the least work (longest processing time first, LPT). The matrices are then divided
into communication buckets, in each of which every owner has about the same work and no rank sends
or receives more than a maximum of cells (optim/exchange.py moves them). Matrices that are whole on
one rank stay there; with replicas, each replica solves them for itself.

Legend: E matrices of a parameter `[E, R, C]`, R rows, C columns, K matrices of a job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import numpy as np

from optim.newton_schulz import newton_schulz_flops
from optim.shard_layout import ShardLayout, ShardRegion


@dataclass(frozen=True)
class MatrixView:
    """Division of a parameter into matrices that are orthogonalised separately.

    Attributes:
        row_blocks: heights of row blocks that are separate matrices, top to bottom (a fused
            projection); empty if the whole parameter is one matrix.
        batched: `[E, R, C]` holds E matrices, one per expert.
    """

    row_blocks: tuple[int, ...] = ()
    batched: bool = False

    def heights(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the number of rows of each matrix of a parameter of `shape`, in order."""
        if self.batched:
            assert len(shape) == 3 and not self.row_blocks, f"{self} of {tuple(shape)}"
            return (shape[1],) * shape[0]
        assert len(shape) == 2, f"Muon is for matrices, not for {tuple(shape)}"
        assert sum(self.row_blocks or shape[:1]) == shape[0], f"{self} of {tuple(shape)}"
        return self.row_blocks or (shape[0],)

    def matrices(self, shape: Sequence[int]) -> list[ShardRegion]:
        """Return the region of each matrix of a parameter of `shape`, viewed as `[E, R, C]`."""
        heights, cols = self.heights(shape), shape[-1]
        if self.batched:
            return [ShardRegion((e, 0, 0), (e + 1, rows, cols)) for e, rows in enumerate(heights)]
        return [
            ShardRegion((0, a, 0), (1, b, cols)) for a, b in pairwise([0, *accumulate(heights)])
        ]

    def __str__(self) -> str:
        if self.batched:
            return "each expert"
        runs = [(len(list(same)), height) for height, same in groupby(self.row_blocks)]
        blocks = " | ".join(
            f"{count} x {height}" if count > 1 else str(height) for count, height in runs
        )
        return f"rows {blocks}" if blocks else "whole"


@dataclass(frozen=True)
class Job:
    """Consecutive matrices of one shape in one parameter that are held by the same ranks.

    Attributes:
        parameter: number of the parameter in the plan.
        region: cells of all matrices of the job: experts, or rows.
        count: number of matrices.
        rows, cols: shape of one matrix.
        holders: ranks that hold cells of the job, over all replicas, in order.
        owner: rank that solves the job.
        moves: no rank holds all of it.
    """

    parameter: int
    region: ShardRegion  # the matrices together: experts, or rows
    count: int
    rows: int  # of one matrix
    cols: int
    holders: tuple[int, ...]  # ranks with cells of it, of all replicas, in order
    owner: int
    moves: bool  # no rank has all of it

    @property
    def cost(self) -> int:
        """Multiplications and additions of Newton-Schulz for the whole job."""
        return self.count * newton_schulz_flops(self.rows, self.cols)

    def for_parameter(self, parameter: int) -> Job:
        """Return a copy of the job for another parameter of the same shape and layout."""
        return replace(self, parameter=parameter)


def jobs_of(
    parameter: int, matrices: Sequence[ShardRegion], layout: ShardLayout, most_cells: int = 0
) -> list[Job]:
    """Return the jobs of one parameter: consecutive matrices of equal shape and holders.

    The first holder is the owner until `choose_owners` assigns another. Matrices that move are
    split into as many jobs as there are ranks, so that all ranks can share the work.

    Args:
        parameter: number of the parameter in the plan.
        matrices: region of each matrix.
        layout: regions that the ranks hold.
        most_cells: most cells of a job, unless it is a single matrix; 0: no limit.
    """

    def holders(matrix: ShardRegion) -> tuple[int, ...]:
        return tuple(r for r, region in enumerate(layout.regions) if region.intersection(matrix))

    jobs: list[Job] = []
    for (shape, on), same in groupby(matrices, lambda matrix: (matrix.shape, holders(matrix))):
        run = list(same)
        moves = len(on) > layout.num_replicas
        most = -(-len(run) // len(layout.regions)) if moves else len(run)
        if most_cells:
            most = min(most, max(1, most_cells // run[0].size))
        for first in range(0, len(run), most):
            part = run[first : first + most]
            region = ShardRegion(part[0].low, part[-1].high)
            jobs.append(Job(parameter, region, len(part), shape[1], shape[2], on, on[0], moves))
    return jobs


def choose_owners(jobs: Sequence[Job], ranks: int) -> list[Job]:
    """Assign an owner to each job that moves, longest processing time first (LPT).

    Work that can't move counts as load from the start. Holders are preferred as long as the busiest
    rank doesn't get busier: the cells that they hold needn't be sent.
    """
    near, plain = (_dealt(jobs, ranks, prefer) for prefer in (True, False))
    return near if max(loads(near, ranks)) <= max(loads(plain, ranks)) else plain


def _dealt(jobs: Sequence[Job], ranks: int, prefer_holders: bool) -> list[Job]:
    """Assign owners by LPT; prefer a holder whose load stays within the mean."""
    load = loads([job for job in jobs if not job.moves], ranks)
    mean = -(-(sum(load) + sum(job.cost for job in jobs if job.moves)) // ranks)
    owners: dict[int, int] = {}
    for i in sorted(range(len(jobs)), key=lambda i: (-jobs[i].cost, i)):
        if jobs[i].moves:
            cost = jobs[i].cost
            near = jobs[i].holders if prefer_holders else ()
            fitting = [r for r in near if load[r] + cost <= max(mean, cost)]
            owners[i] = min(fitting or range(ranks), key=lambda r: (load[r], r))
            load[owners[i]] += cost
    return [replace(job, owner=owners.get(i, job.owner)) for i, job in enumerate(jobs)]


def loads(jobs: Sequence[Job], ranks: int) -> list[int]:
    """Return FLOPs per rank; every holder solves jobs that don't move."""
    load = [0] * ranks
    for job in jobs:
        for rank in (job.owner,) if job.moves else job.holders:
            load[rank] += job.cost
    return load


def buckets_of(
    jobs: Sequence[Job], layouts: dict[int, ShardLayout], ranks: int, most_cells: int
) -> list[list[Job]]:
    """Divide jobs that move into buckets with about the same share of every owner's work.

    In a bucket no rank sends or receives more than `most_cells`, neither towards the owners nor
    back, unless a single job is larger.

    Args:
        jobs: jobs with their owners.
        layouts: shard layout per parameter number.
        ranks: number of ranks.
        most_cells: limit per rank, direction and bucket.
    """
    if not jobs:
        return []
    # Cells sent to owners never exceed those returned, so only returned cells are limited.
    held_IW = np.stack(_held(jobs, layouts, ranks))  # I jobs, W ranks
    returned_IW = np.zeros_like(held_IW)
    returned_IW[np.arange(len(jobs)), [job.owner for job in jobs]] = held_IW.sum(1)
    # A job above the limit fills the bucket for its rank only; others can still join it.
    held_IW, returned_IW = (np.minimum(cells, most_cells) for cells in (held_IW, returned_IW))
    places = _places(jobs)
    order = sorted(range(len(jobs)), key=lambda i: (places[i], i))
    fewest = -(-max(held_IW.sum(0).max(), returned_IW.sum(0).max()) // most_cells)
    most_of_owner = max(np.bincount([job.owner for job in jobs]))
    number = max(1, int(fewest))
    while number < 2 * most_of_owner + 2:
        index = np.array([min(int(place * number), number - 1) for place in places])
        sums = [np.zeros((number, ranks), np.int64) for _ in range(2)]
        np.add.at(sums[0], index, held_IW)
        np.add.at(sums[1], index, returned_IW)
        if max(int(s.max()) for s in sums) <= most_cells:
            buckets = [[jobs[i] for i in order if index[i] == bucket] for bucket in range(number)]
            return [bucket for bucket in buckets if bucket]
        number += max(1, number // 16)
    return _greedy([(jobs[i], held_IW[i], returned_IW[i]) for i in order], most_cells)


def _held(jobs: Sequence[Job], layouts: dict[int, ShardLayout], ranks: int) -> list[np.ndarray]:
    """Return the number of cells per rank `[W]` of each job; equal layouts are counted once."""
    known: dict[tuple[int, ShardRegion], np.ndarray] = {}
    for job in jobs:
        layout = layouts[job.parameter]
        if (id(layout), job.region) not in known:
            row_W = known[id(layout), job.region] = np.zeros(ranks, np.int64)
            for rank in job.holders:
                met = layout.regions[rank].intersection(job.region)
                row_W[rank] = met.size if met else 0
    return [known[id(layouts[job.parameter]), job.region] for job in jobs]


def _places(jobs: Sequence[Job]) -> list[float]:
    """Return the position of each job's middle in its owner's work, 0 to 1, costliest first."""
    places = [0.0] * len(jobs)
    totals: dict[int, int] = {}
    for job in jobs:
        totals[job.owner] = totals.get(job.owner, 0) + job.cost
    done = dict.fromkeys(totals, 0)
    for i in sorted(range(len(jobs)), key=lambda i: (-jobs[i].cost, i)):
        owner, cost = jobs[i].owner, jobs[i].cost
        places[i] = (done[owner] + cost / 2) / max(1, totals[owner])
        done[owner] += cost
    return places


def _greedy(jobs: Sequence[tuple[Job, np.ndarray, np.ndarray]], most_cells: int) -> list[list[Job]]:
    """Fill buckets in order; open a new one where the limit of a rank would be exceeded."""
    buckets: list[list[Job]] = []
    held, returned = jobs[0][1] * 0, jobs[0][2] * 0
    for job, more, back in jobs:
        if not buckets or max((held + more).max(), (returned + back).max()) > most_cells:
            buckets.append([])
            held, returned = held * 0, returned * 0
        buckets[-1].append(job)
        held, returned = held + more, returned + back
    return buckets


def fingerprint(of: object) -> int:
    """Return a 62-bit hash of a plan, to compare plans between ranks."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:8], "big") >> 2
