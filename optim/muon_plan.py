"""The plan of Muon's step: who orthogonalises what, made once from shapes and placements alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.memory.forms.muon import (
    BLOCK_CELLS,
    WaveBytes,
    newton_schulz_bytes,
    packing_bytes,
    step_peak_bytes,
)
from optim.exchange import CommBucket, LocalJobs, MatrixKind, PackedBuffer, RankContext, SolveBatch
from optim.newton_schulz import CPU_BATCH_BYTES, CUDA_BATCH_BYTES, Coefficients, least_batch
from optim.ownership import Job, MatrixView, buckets_of, choose_owners, fingerprint, jobs_of, loads
from optim.shard_layout import ShardLayout, layout_of


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter that Muon moves.

    Attributes:
        group: the number of its parameter group, for settings that are read at every step.
        solver: steps and coefficients of Newton-Schulz.
    """

    parameter: Tensor
    group: int
    view: MatrixView
    wire: torch.dtype
    solver: tuple[int, Coefficients] = (5, "quintic")

    @property
    def kind(self) -> MatrixKind:
        return MatrixKind((self.group, self.parameter.dtype), self.solver)


class Exchange:
    """The plan of one set of ranks: which matrices stay, which travel, and in which waves."""

    def __init__(
        self,
        matrices: dict[int, Matrix],
        layouts: dict[int, ShardLayout],
        wire: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        """All numbered parameters have cells on the same ranks; `bucket_bytes` in bytes."""
        some, parameter = next(iter(layouts.values())), next(iter(matrices.values())).parameter
        assert all((x.rank, x.ranks) == (some.rank, some.ranks) for x in layouts.values())
        self.wire, self.group, self.num_ranks = wire, some.group, len(some.regions)
        batch = batch_cells(parameter, wire)
        kinds = {number: matrix.kind for number, matrix in matrices.items()}
        dims = {number: matrix.parameter.dim() for number, matrix in matrices.items()}
        rank = RankContext(some.rank, self.num_ranks, layouts, kinds, batch, BLOCK_CELLS, dims)
        most = max(1, bucket_bytes // wire.itemsize)
        alike: dict[Any, list[Job]] = {}  # many parameters are cut in the same way
        jobs: list[Job] = []
        for number, matrix in matrices.items():
            layout, shape = layouts[number], matrix.parameter.shape
            key = (id(layout), tuple(shape), matrix.view)
            if key not in alike:
                regions = matrix.view.matrices(shape)
                alike[key] = jobs_of(number, regions, layout, min(batch, most))
            jobs += [job.for_parameter(number) for job in alike[key]]
        self.jobs = choose_owners(jobs, self.num_ranks)
        here = [i for i in self.jobs if not i.moves and some.rank in i.holders]
        moving = [job for job in self.jobs if job.moves]
        dealt = buckets_of(moving, layouts, self.num_ranks, most)
        self.buckets = [CommBucket(bucket, rank) for bucket in dealt]
        # What needn't travel is packed a few batches at a time, to be in caches when it is solved.
        portions = _portions(here, min(most, max(batch, BLOCK_CELLS)))
        self.staying = [LocalJobs(part, rank) for part in portions]
        solvers = [kind.solve for kind in kinds.values()]  # order matrices within a wave
        self.fingerprint = fingerprint((wire, bucket_bytes, some.ranks, self.jobs, dealt, solvers))

    @property
    def loads(self) -> list[int]:
        """Multiplications and additions of Newton-Schulz of each rank."""
        return loads(self.jobs, self.num_ranks)

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; with few matrices for many ranks some idle."""
        return max(self.loads) * self.num_ranks / sum(self.loads)


def batch_cells(parameter: Tensor, wire: torch.dtype) -> int:
    """Most cells of matrices that Newton-Schulz takes together, where one isn't larger already."""
    if parameter.is_cuda:
        return CUDA_BATCH_BYTES // wire.itemsize
    return 1 if wire == torch.float64 else CPU_BATCH_BYTES // wire.itemsize


def _portions(jobs: Sequence[Job], most_cells: int) -> list[list[Job]]:
    """Items by shape, in lists of at most `most_cells`, or of one item."""
    portions: list[list[Job]] = []
    cells = 0
    for job in sorted(jobs, key=lambda job: (job.rows, job.cols)):
        cells += job.region.size
        if not portions or cells > most_cells:
            portions.append([])
            cells = job.region.size
        portions[-1].append(job)
    return portions


def _agree(exchange: Exchange, of: int, device: torch.device) -> None:
    """Asserts that all ranks made the same plan; otherwise they would wait for each other.

    `of`: the number of exchanges of this rank.
    """
    group = exchange.group
    if group is None or dist.get_backend(group) == "fake":
        return
    number = fingerprint((exchange.fingerprint, of))
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    most, least = both.tolist()
    assert most == -least == number, (
        f"ranks {dist.get_process_group_ranks(group)} made different plans of who orthogonalises "
        "what: their optimizers hold different parameters, settings, or orders of these"
    )


class MuonPlan:
    """Of all matrices of an optimizer; parameters that the same ranks hold share their waves.

    Args:
        matrices: in an order on which all ranks agree.
        bucket_bytes: most that a rank sends, or receives, at once.
        process_groups: of ranks that share parameters cut along several mesh axes, or repeated
            along some; see `layout_of`.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        bucket_bytes: int = 32 << 20,
        process_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.matrices = list(matrices)
        known: dict[Any, ShardLayout] = {}
        alike: dict[Any, dict[int, ShardLayout]] = {}
        for number, matrix in enumerate(self.matrices):
            p = matrix.parameter
            matrix.view.heights(p.shape)  # a view that doesn't fit fails here
            key = (tuple(p.shape), getattr(p, "placements", ()), getattr(p, "device_mesh", None))
            if key not in known:
                known[key] = layout_of(p, process_groups)
            layout = known[key]
            alike.setdefault((layout.ranks, matrix.wire), {})[number] = layout
        self.exchanges = [
            Exchange({n: self.matrices[n] for n in some}, some, wire, bucket_bytes)
            for (_, wire), some in alike.items()
        ]
        for exchange in self.exchanges:
            _agree(exchange, len(self.exchanges), self.matrices[0].parameter.device)

    def transient_bytes(self, momenta: Sequence[Tensor]) -> int:
        """Most bytes alive at once in a step of this rank, beside parameters, gradients and state.

        For gradients of the parameters' dtype, and without cautious decay, which needs up to three
        times the largest piece for a moment.
        """
        cuda = any(matrix.parameter.is_cuda for matrix in self.matrices)

        def packing(blocks: Sequence[PackedBuffer]) -> int:
            return max((self._packing_bytes(b, momenta) for b in blocks), default=0)

        buckets = [
            WaveBytes(
                w.sent.cells * e.wire.itemsize,
                w.received.cells * e.wire.itemsize,
                w.returned.cells * e.wire.itemsize,
                w.arriving.cells * e.wire.itemsize,
                packing(w.blocks),
                max((_solving_bytes(b, c, e.wire, cuda) for b, c in w.copied), default=0),
                packing(w.aside),
            )
            for e in self.exchanges
            for w in e.buckets
        ]
        staying = [
            WaveBytes(
                stay.cells * e.wire.itemsize,
                packing=packing(stay.blocks),
                solving=max(_solving_bytes(b, 0, e.wire, cuda) for b in stay.batches),
            )
            for e in self.exchanges
            for stay in e.staying
        ]
        return step_peak_bytes(buckets, staying)

    def _packing_bytes(self, block: PackedBuffer, momenta: Sequence[Tensor]) -> int:
        number = block.pieces[0].job.parameter
        widths = momenta[number].itemsize, self.matrices[number].parameter.itemsize
        return packing_bytes(block.cells, *widths)


def _solving_bytes(batch: SolveBatch, copied: int, wire: torch.dtype, cuda: bool) -> int:
    """Of one batch, `copied` cells of which are put together first."""
    least = 1 if cuda else least_batch(min(batch.rows, batch.cols), wire.itemsize)
    count = max(least, batch.count)
    work = newton_schulz_bytes(count, batch.rows, batch.cols, wire.itemsize)
    return copied * wire.itemsize + work
