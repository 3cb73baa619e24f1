"""Plan of Muon's step: the owner of each matrix, computed once from shapes and placements."""

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
from optim.exchange import CommBucket, PackedBuffer, SolveBatch
from optim.newton_schulz import CPU_BATCH_BYTES, CUDA_BATCH_BYTES, Coefficients, least_batch
from optim.ownership import Job, MatrixView, buckets_of, choose_owners, fingerprint, jobs_of, loads
from optim.packing import MatrixKind, RankContext, comm_bucket, local_jobs
from optim.shard_layout import ShardLayout, layout_of


@dataclass(frozen=True, eq=False)
class Matrix:
    """Parameter that Muon updates.

    Attributes:
        parameter: `[R, C]` or `[E, R, C]`.
        group: number of its parameter group, whose settings are read at every step.
        view: division into matrices.
        wire: dtype of Newton-Schulz and of the exchange.
        solver: number of Newton-Schulz steps and their coefficients.
    """

    parameter: Tensor
    group: int
    view: MatrixView
    wire: torch.dtype
    solver: tuple[int, Coefficients] = (5, "quintic")

    @property
    def kind(self) -> MatrixKind:
        """Key of matrices that can be processed together."""
        return MatrixKind((self.group, self.parameter.dtype), self.solver)


class Exchange:
    """Plan of one set of ranks: matrices that stay, and the buckets of those that travel.

    Args:
        matrices: matrices by their number in the plan.
        layouts: shard layouts by the same numbers; all over the same ranks.
        wire: dtype of the exchange.
        bucket_bytes: most bytes that a rank sends or receives per bucket.
    """

    def __init__(
        self,
        matrices: dict[int, Matrix],
        layouts: dict[int, ShardLayout],
        wire: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        """Build the plan; all parameters of a plan must be sharded over the same ranks."""
        some, parameter = next(iter(layouts.values())), next(iter(matrices.values())).parameter
        assert all((x.rank, x.ranks) == (some.rank, some.ranks) for x in layouts.values())
        self.wire, self.group, self.num_ranks = wire, some.group, len(some.regions)
        batch = batch_cells(parameter, wire)
        kinds = {number: matrix.kind for number, matrix in matrices.items()}
        dims = {number: matrix.parameter.dim() for number, matrix in matrices.items()}
        rank = RankContext(some.rank, self.num_ranks, layouts, kinds, batch, BLOCK_CELLS, dims)
        most = max(1, bucket_bytes // wire.itemsize)
        alike: dict[Any, list[Job]] = {}  # many parameters are sharded alike
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
        self.buckets = [comm_bucket(bucket, rank) for bucket in dealt]
        # Local jobs are packed a few batches at a time, so that they stay in caches until solved.
        portions = _portions(here, min(most, max(batch, BLOCK_CELLS)))
        self.staying = [local_jobs(part, rank) for part in portions]
        solvers = [kind.solve for kind in kinds.values()]  # they order matrices within a bucket
        self.fingerprint = fingerprint((wire, bucket_bytes, some.ranks, self.jobs, dealt, solvers))

    @property
    def loads(self) -> list[int]:
        """Multiplications and additions of Newton-Schulz per rank."""
        return loads(self.jobs, self.num_ranks)

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; above 1 some ranks idle."""
        return max(self.loads) * self.num_ranks / sum(self.loads)


def batch_cells(parameter: Tensor, wire: torch.dtype) -> int:
    """Return the most cells that Newton-Schulz processes together, unless one matrix is larger.

    Args:
        parameter: parameter of any shape, for its device.
        wire: dtype of the iteration.
    """
    if parameter.is_cuda:
        return CUDA_BATCH_BYTES // wire.itemsize
    return 1 if wire == torch.float64 else CPU_BATCH_BYTES // wire.itemsize


def _portions(jobs: Sequence[Job], most_cells: int) -> list[list[Job]]:
    """Sort jobs by shape and split them into lists of at most `most_cells`, or of one job."""
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
    """Assert that all ranks made the same plan; different plans would deadlock.

    Args:
        exchange: plan of this rank.
        of: number of exchanges of this rank.
        device: device for the all-reduce.
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
    """Plan of all matrices of an optimizer; parameters on the same ranks share their buckets.

    Args:
        matrices: matrices in an order that is the same on all ranks.
        bucket_bytes: most bytes that a rank sends, or receives, at once.
        process_groups: groups of ranks that hold parameters which several mesh axes shard or
            replicate; see `layout_of`.
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
        """Return the peak bytes that a step allocates beside parameters, gradients and state.

        The gradients are assumed to have the parameters' dtype. Cautious decay is left out: it
        allocates up to three times the largest slice for a moment.

        Args:
            momenta: momentum per matrix, in the order of `matrices`.
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
                max((_solving_bytes(b, c, e.wire, cuda) for b, c in _copied(w)), default=0),
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


def _copied(bucket: CommBucket) -> list[tuple[SolveBatch, int]]:
    """Return batches with the cells copied to assemble each; 0 if it arrives contiguous."""
    both = zip(bucket.batches, bucket.sources, strict=True)
    return [(batch, batch.cells if len(runs) > 1 else 0) for batch, runs in both]


def _solving_bytes(batch: SolveBatch, copied: int, wire: torch.dtype, cuda: bool) -> int:
    """Return the bytes that solving a batch allocates; `copied` cells are assembled first."""
    least = 1 if cuda else least_batch(min(batch.rows, batch.cols), wire.itemsize)
    count = max(least, batch.count)
    work = newton_schulz_bytes(count, batch.rows, batch.cols, wire.itemsize)
    return copied * wire.itemsize + work
