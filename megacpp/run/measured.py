"""What the first step of a run took of a device's memory, next to what was estimated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megacpp.dtensor import is_dtensor
from megacpp.memory.budget import resident_bytes
from megacpp.memory.calibration import Record, compared, write_record
from megacpp.memory.components import COMPONENTS, RESTING
from megacpp.run.gate import Admission
from megacpp.run.metrics import peak_resident_bytes

OUTSIDE = ("runtime_reserved", "allocator_overhead")  # of tensors
STEP = "optimizer step"  # the moment of an estimate at which all gradients are there
OF_A_STEP = "tensors_of_a_step"  # all that doesn't rest; no allocator tells them apart


@dataclass
class Calibrator:
    """Measures the first step, and has the main rank write it down beside its estimate.

    On a GPU: live tensors, the peaks of the allocator, and what the device has in use beyond what
    the allocator reserved (whoever uses it). On a CPU: live tensors, and how far the step's peak
    takes the resident set above where it stood with weights and optimizer state; of the rest
    nothing can be measured. Gradients are those that the optimizer steps with, to be compared only
    where that is the fullest moment. State exists from the start, so the first step is as full as
    any.

    Args:
        of_all: elementwise largest over all ranks, in place; every rank calls it.
    """

    admission: Admission
    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    of_all: Callable[[Tensor], Tensor]
    is_main: bool
    _gradients: int = 0
    _stood: int = 0
    _hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.admission.calibration:  # its folder; none: nothing is measured
            self._hooks = [self.optimizer.register_step_pre_hook(self._see_gradients)]
            self._stood = resident_bytes()

    def after_step(self, updated: bool) -> list[str]:
        """Once a step is over; of the first that updated the weights a record is made.

        Returns:
            Why none could be written, on the main rank; else nothing.
        """
        if not self._hooks or not updated:
            return []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        measured = self._most(self._measure())
        if not self.is_main:
            return []
        folder = Path(self.admission.calibration)
        record = self._record(measured)
        others = {"ranks": self.admission.situation.about["hardware"]["count"], "peaks": measured}
        try:
            write_record(folder, record, self.admission.situation, **others)
        except OSError as error:  # a full or read-only disk is no reason to stop training
            return [f"memory.calibration={folder}: no record was written ({error.strerror})"]
        return []

    def _record(self, measured: dict[str, int | None]) -> Record:
        estimate, where = self.admission.estimate, self.admission.situation
        predicted = dict(estimate.components)
        tensors = [name for name in COMPONENTS if name not in OUTSIDE]
        predicted[OF_A_STEP] = sum(
            predicted.get(name, 0) for name in tensors if name not in RESTING
        )
        comparable = measured | {"gradients": None} if estimate.moment != STEP else measured
        total = measured["total"]
        assert total is not None
        names = [*COMPONENTS, OF_A_STEP]
        return Record(
            where.key,
            where.family,
            where.rows,
            self.admission.predicted_bytes,
            total,
            compared(predicted, comparable, names),
            written=time.time(),
        )

    def _see_gradients(self, *_: Any) -> None:
        grads = (p.grad for p in self.model.parameters())
        self._gradients = held_bytes(g for g in grads if g is not None)

    def _measure(self) -> dict[str, int | None]:
        """Bytes of this rank by name; None: not to be measured here."""
        state = (
            value
            for entries in self.optimizer.state.values()
            for value in entries.values()
            if isinstance(value, Tensor)
        )
        resting = {
            "parameters": held_bytes(self.model.parameters()),
            "optimizer_state": held_bytes(state),
        }
        live: dict[str, int | None] = {**resting, "gradients": self._gradients}
        if self.device.type != "cuda":
            grown = max(0, peak_resident_bytes() - self._stood)
            return {**live, "total": sum(resting.values()) + grown}
        stats = torch.cuda.memory_stats(self.device)
        allocated = stats["allocated_bytes.all.peak"]
        reserved = stats["reserved_bytes.all.peak"]
        free, whole = torch.cuda.mem_get_info(self.device)
        outside = max(0, whole - free - stats["reserved_bytes.all.current"])
        return {
            **live,
            OF_A_STEP: max(0, allocated - sum(resting.values())),
            "runtime_reserved": outside,
            "allocator_overhead": reserved - allocated,
            "peak_allocated": allocated,
            "peak_reserved": reserved,
            "total": reserved + outside,
        }

    def _most(self, measured: dict[str, int | None]) -> dict[str, int | None]:
        """The largest of every figure over all ranks; the same figures exist on each."""
        known = {name: value for name, value in measured.items() if value is not None}
        values = torch.tensor(list(known.values()), dtype=torch.int64, device=self.device)
        return measured | dict(zip(known, self.of_all(values).tolist(), strict=True))


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the parts that this rank holds on a device or on the host."""
    return sum(map(_own_bytes, tensors))


def _own_bytes(t: Tensor) -> int:
    local = t.to_local() if is_dtensor(t) else t
    if is_traceable_wrapper_subclass(local):  # packed moments: codes and what they stand for
        names, _ = local.__tensor_flatten__()  # type: ignore[attr-defined]
        return sum(_own_bytes(getattr(local, name)) for name in names)
    return local.numel() * local.itemsize
