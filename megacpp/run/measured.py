"""Measurement of the first step's device memory, next to its estimate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megacpp.memory.calibration import OF_A_STEP, Record, compared, write_record
from megacpp.memory.components import COMPONENTS, RESTING
from megacpp.memory.snapshot import Snapshot
from megacpp.run.metrics import peak_resident_bytes
from megacpp.state.files import write_json

if TYPE_CHECKING:
    from megacpp.launch.gate import Admission

OUTSIDE = ("runtime_reserved", "allocator_overhead")  # not in tensors
IN_TENSORS = tuple(name for name in COMPONENTS if name not in OUTSIDE)
FILE = "measured.json"  # in RUN/memory


@dataclass
class Calibrator:
    """Measurement of the first step of a full batch that updates the weights, by the first rank.

    The step's allocations are recorded one by one (`Forensics`); this gives the peak of live
    tensors by component on a CPU and on a GPU alike. Components are those of the estimated rank,
    the total is the largest of all ranks. On a CPU the total counts tensors, as the estimate does.
    On a GPU it is the memory in use on the device: reserved by the allocator, and outside of it. A
    step that can't be recorded (compiled blocks) has no components, and on a CPU no total: then
    nothing is stored there.

    Args:
        admission: estimate of the run.
        device: device of this rank.
        of_all: elementwise maximum over all ranks, in place; every rank calls it.
        rank: this rank.
        folder: folder of the run.

    Attributes:
        waiting: the next step of a full batch has to be recorded.
    """

    admission: Admission
    device: torch.device
    of_all: Callable[[Tensor], Tensor]
    rank: int
    folder: Path
    waiting: bool = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = bool(self.admission.calibration)  # without a folder nothing is measured

    def after_step(self, updated: bool, full: bool, found: Snapshot | None) -> list[str]:
        """Store the first step of a full batch that updated the weights; every rank calls it.

        Args:
            updated: the step changed the weights.
            full: it had all microbatches, and isn't one of a batch warmup.
            found: snapshot of the step by `Forensics`.

        Returns:
            On the main rank the reason why no record could be written; else nothing.
        """
        if not (self.waiting and updated and full) or found is None:
            return []
        self.waiting = False
        measured = self._over_ranks(self._of_rank(found))
        if self.rank or measured["total"] is None:
            return []
        folder, record = Path(self.admission.calibration), self._record(measured)
        hardware = self.admission.situation.about["hardware"]
        others = {"ranks": hardware["count"], "peaks": measured, "step": found.step}
        others |= {"rank": self.admission.rank, "measures": hardware["measures"]}
        try:
            write_json(self.folder / "memory" / FILE, {**asdict(record), **others})
            write_record(folder, record, self.admission.situation, **others)
        except OSError as error:  # a full or read-only disk is no reason to stop training
            return [f"memory.calibration={folder}: no record was written ({error.strerror})"]
        return []

    def _record(self, measured: dict[str, int | None]) -> Record:
        where = self.admission.situation
        predicted = dict(self.admission.estimate.components)
        predicted[OF_A_STEP] = sum(predicted.get(n, 0) for n in IN_TENSORS if n not in RESTING)
        total = measured["total"]
        assert total is not None
        return Record(
            where.key,
            where.family,
            where.rows,
            self.admission.predicted_bytes,
            total,
            compared(predicted, measured, [*COMPONENTS, OF_A_STEP]),
            written=time.time(),
        )

    def _of_rank(self, found: Snapshot) -> dict[str, int | None]:
        """Return the bytes of this rank by name; None if they can't be measured here."""
        names = IN_TENSORS if found.followed else RESTING
        resting = sum(found.at_peak.get(name, 0) for name in RESTING)
        values: dict[str, int | None] = {n: None for n in IN_TENSORS}
        values |= {name: found.at_peak.get(name, 0) for name in names}
        values["process"] = peak_resident_bytes()
        peak = found.peak_bytes if found.followed else None
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            free, whole = torch.cuda.mem_get_info(self.device)
            outside = max(0, whole - free - stats["reserved_bytes.all.current"])
            values["runtime_reserved"] = outside
            values["allocator_overhead"] = found.overhead_bytes
            values["peak_allocated"] = found.allocated_bytes
            values["peak_reserved"] = found.reserved_bytes
            values["total"] = found.reserved_bytes + outside
            peak = found.allocated_bytes if peak is None else peak
        else:
            values["total"] = peak
        values[OF_A_STEP] = None if peak is None else max(0, peak - resting)
        return values

    def _over_ranks(self, own: dict[str, int | None]) -> dict[str, int | None]:
        """Return the estimated rank's components, and of all else the maximum over ranks."""
        known = {name: value for name, value in own.items() if value is not None}
        mine = self.rank == self.admission.rank
        values = [v if mine or name not in COMPONENTS else 0 for name, v in known.items()]
        table = torch.tensor(values, dtype=torch.int64, device=self.device)
        return own | dict(zip(known, self.of_all(table).tolist(), strict=True))
