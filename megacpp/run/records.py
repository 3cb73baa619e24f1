"""Records of a run's steps: lines, metrics, warnings, snapshots and measured memory.

    records = open_records(...)
    for step in ...:
        records.begin(step)
        ...                           # the whole step
        records.end(step, status, ...)
    records.close(sum_over_ranks, ranks)

Records observe the run and change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from megacpp.run.expert_load import LoadWatch, load_figures
from megacpp.run.forensics import Forensics, Watch
from megacpp.run.health import Health
from megacpp.run.measured import Calibrator
from megacpp.run.metrics import MetricsLog, StepRecord, bits_per_byte, peak_memory_bytes
from megacpp.run.predicted import TEN, Prediction, verdict
from megacpp.run.profiling import StepProfile
from megacpp.run.step_status import StepStatus

if TYPE_CHECKING:
    from megacpp.launch.start import PreparedLaunch


@dataclass
class Records:
    """Records of one rank; the main rank prints.

    Args:
        log: lines of the screen, metrics.jsonl, TensorBoard, Weights & Biases.
        health: warnings about gradient norms and losses.
        balance: warnings about expert load.
        forensics: memory snapshots.
        calibrator: measured memory of the first step.
        mfu: model FLOP utilisation for a number of tokens per second.
        where: names the ranks and parts of the model with non-finite values; collective.
        profile: traces of the steps in `run.profile`.
        predicted: speed that the first ten steps are compared with.
    """

    log: MetricsLog
    health: Health
    balance: LoadWatch
    forensics: Forensics
    calibrator: Calibrator
    mfu: Callable[[float], float | None]
    where: Callable[[], str]
    profile: StepProfile
    predicted: Prediction | None = None
    _began: float = field(default=0.0, init=False)
    _steps: list[float] = field(default_factory=list, init=False)

    def begin(self, step: int) -> None:
        """Start the timer and the recorders, before anything of a step happens."""
        self._began = time.perf_counter()
        self.profile.begin(step)
        self.forensics.begin(step, asked=self.calibrator.waiting)

    def end(
        self,
        step: int,
        status: StepStatus,
        *,
        tokens: int,
        grad_accum: int,
        lr: float,
        rates: Mapping[str, float],
        figures: Mapping[str, float],
    ) -> None:
        """Record a step after it was applied or skipped; every rank calls it.

        Args:
            step: index of the step.
            status: statistics of the step that all ranks agree on.
            tokens: tokens of the step, over all ranks.
            grad_accum: microbatches of the step.
            lr: learning rate of AdamW in this step.
            rates: learning rate by parameter group.
            figures: further figures by name, for metrics.jsonl and the sinks.
        """
        step_s = time.perf_counter() - self._began
        say = self.log.warn
        say(self.profile.end(step))
        say(self.forensics.end(step))
        if status.healthy:
            say(self.health.observe(step, status.loss, status.grad_norm))
            say(self.balance.observe(step, status.loads))
        if status.trouble:
            fate = "left out" if not status.healthy else "taken with zeros instead"
            where = self.where() or "no rank's gradients before the reduction"
            say([f"step {step + 1}: {fate}: {status.trouble} ({where})"])
        record = StepRecord(
            step=step,
            loss=status.loss,
            bits_per_byte=bits_per_byte(status.nll_sum, status.target_bytes),
            grad_norm=status.grad_norm,
            lr=lr,
            tokens=tokens,
            valid_tokens=status.valid_tokens,
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            peak_bytes=peak_memory_bytes(self.forensics.device),
            grad_accum=grad_accum,
            nonfinite=status.nonfinite,
            skipped=not status.healthy,
            mfu=self.mfu(tokens / step_s),
            more=self._further(status) | {"lr_groups": rates} | dict(figures),
        )
        self.log.write(record)
        say(self._compared(step_s))
        say(self.calibrator.after_step(status.healthy, self.forensics.seen))

    def _compared(self, step_s: float) -> list[str]:
        """Return a line about predicted and measured steps, once, after `TEN` of them."""
        if self.predicted is None or len(self._steps) >= TEN:
            return []
        self._steps.append(step_s)
        if len(self._steps) < TEN:
            return []
        return [verdict(self.predicted.as_dict(), self._steps)]

    def close(self, sum_over_ranks: Callable[[Tensor], Tensor], ranks: int) -> None:
        """Close all records at the end of the run; every rank calls it."""
        self.log.warn(self.profile.close())
        self.forensics.close(sum_over_ranks, ranks)
        self.log.close()

    def _further(self, status: StepStatus) -> dict[str, float | Mapping[str, float] | None]:
        """Return figures that only some runs have."""
        compared = self.health.figures() if status.healthy else {}
        return {
            **{f"aux_{term}": value for term, value in status.auxiliary.items()},
            **compared,
            "aux_gradient_ratio": status.auxiliary_ratio,
            "loss_scale": status.loss_scale,
            "loss_by_source": status.loss_by_source or None,
            **load_figures(status.loads),
        }


def open_records(
    launch: PreparedLaunch,
    log: MetricsLog,
    health: Health,
    rank: int,
    of_all: Callable[[Tensor], Tensor],
    mfu: Callable[[float], float | None],
    where: Callable[[], str],
    watch: Callable[[], Watch],
) -> Records:
    """Return the records of a run on this rank.

    Args:
        launch: checked configuration, with the memory estimate.
        log: lines and metrics.
        health: warnings about gradient norms and losses.
        rank: index of this rank.
        of_all: elementwise maximum over all ranks.
        mfu, where: as in `Records`.
        watch: makes the recorder of one step.
    """
    config, device, folder = launch.config, launch.device, Path(launch.config.run.dir)
    forensics = Forensics(folder, config, rank, device, watch, log.first_step)
    calibrator = Calibrator(launch.admission, device, of_all, rank, folder)
    balance = LoadWatch(config.model.moe.load_warning)
    profile = StepProfile(config.run.profile, folder, rank, device)
    return Records(
        log, health, balance, forensics, calibrator, mfu, where, profile, launch.predicted
    )
