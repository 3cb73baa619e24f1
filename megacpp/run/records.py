"""Records of a run: time, lines, metrics, warnings, snapshots, held-out loss, and what follows.

    records = Records(launch, peers)      # the clock runs, and signals are heard
    records.open(state, ...)              # once the state is resumed
    while ...:
        records.begin(step)
        ...                               # the whole step
        records.end(step, status, ...)
        if records.must_go_back(step):    # a bad streak, or copies that differ
            records.go_back()
    records.finish(model, loss)
    records.close()

Records observe the run; only a rewind changes its state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megacpp.errors import PreemptedError
from megacpp.run.evaluate import HeldOut
from megacpp.run.expert_load import LoadWatch, load_figures
from megacpp.run.final import finish
from megacpp.run.forensics import Forensics, Watch
from megacpp.run.goodput import Goodput
from megacpp.run.health import Health, ended_badly
from megacpp.run.measured import Calibrator
from megacpp.run.metrics import MetricsLog, StepRecord, bits_per_byte, peak_memory_bytes
from megacpp.run.predicted import TEN, verdict
from megacpp.run.preemption import StopRequest
from megacpp.run.profiling import StepProfile
from megacpp.run.rank_store import RankStore
from megacpp.run.rewind import Rewinds
from megacpp.run.step_status import StepStatus
from megacpp.run.tasks import Tasks
from megacpp.state.agreement import share
from megacpp.state.digests import Digests
from megacpp.state.files import rows_by_step
from megacpp.state.training import TrainingState

if TYPE_CHECKING:
    from megacpp.launch.start import PreparedLaunch


class Records:
    """Records of one rank; the main rank prints and writes.

    Args:
        launch: checked configuration, with corpus and memory estimate.
        peers: store of all ranks; the watch over hangs reads the phases of the clock from it.

    Attributes:
        stop: request to stop (SIGTERM, SIGHUP): save after this step and leave.
        clock: wall time by class.
        say: prints a line at once, on the main rank; None elsewhere.
        health: warnings about gradient norms and losses; saved with the state.
    """

    def __init__(self, launch: PreparedLaunch, peers: RankStore) -> None:
        self.launch, self.rank = launch, peers.rank
        self.stop, self.health = StopRequest(), Health()
        compiles = launch.config.train.compile != "off"
        self.clock = Goodput(launch.folder, self.rank == 0, compiles, launch.retried_s)
        peers.clock = self.clock
        self.say = partial(print, flush=True) if self.rank == 0 else None

    def open(
        self,
        state: TrainingState,
        share: tuple[int, int],
        evaluate: Callable[..., Any],
        where: Callable[[], str],
        mfu: Callable[[float], float | None],
        watch: Callable[[], Watch],
        of_all: Callable[[Tensor], Tensor],
        of_sum: Callable[[Tensor], Tensor],
    ) -> None:
        """Open the files, once the state is resumed; every rank calls it.

        Args:
            state: state of the run.
            share: index among the data ranks, and their number.
            evaluate: sums of held-out batches, from the accumulation boundary.
            where: names the ranks and parts of the model with non-finite values; collective.
            mfu: model FLOP utilisation for a number of tokens per second.
            watch: makes the recorder of one step.
            of_all, of_sum: elementwise maximum and sum over all ranks.
        """
        launch, config, rank = self.launch, self.launch.config, self.rank
        folder, device = launch.folder, launch.device
        self.state, self.mfu, self.where, self.of_sum = state, mfu, where, of_sum
        launch.peers.writer, state.writer.stop = state.writer, self.stop
        launch.open_uploads(state)
        self.log = MetricsLog(folder, config, state.step, rank == 0)
        self.rewinds = Rewinds(folder, config, state, self.health, self.log, rank == 0)
        self.copies = Digests(folder, state.tensors, config, device)
        self.forensics = Forensics(folder, config, rank, device, watch, state.step)
        self.calibrator = Calibrator(launch.admission, device, of_all, rank, folder)
        self.balance = LoadWatch(config.model.moe.load_warning)
        self.profile = StepProfile(config.run.profile, folder, rank, device)
        self.held_out = HeldOut(launch.corpus, config, share, evaluate, self.log)
        told = rank == 0, of_sum, self.clock.alive
        self.tasks = Tasks(state.model, launch.corpus, config, *told)
        self._began, self._steps, self._full = 0.0, list[float](), False
        if state.step < config.run.steps:
            self._catch_up(state.step - 1)

    def begin(self, step: int) -> None:
        """Start the timer and the recorders, before anything of a step happens."""
        self.clock.step(step)
        self._began = time.perf_counter()
        self.profile.begin(step)
        batches = self.launch.batches  # the estimate is of the full batch, not of a warmup's
        self._full = batches.accum(step) == batches.grad_accum
        self.forensics.begin(step, asked=self.calibrator.waiting and self._full)

    def end(
        self,
        step: int,
        status: StepStatus,
        *,
        grad_accum: int,
        factor: float,
        rates: Mapping[str, float],
        figures: Mapping[str, float],
    ) -> None:
        """Record a step after it was applied or skipped; every rank calls it.

        Args:
            step: index of the step.
            status: statistics of the step that all ranks agree on.
            grad_accum: microbatches of the step.
            factor: of peak learning rates in this step.
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
        self._differs = status.differs
        if status.audit_s is not None:
            say([f"step {step + 1}: gradients computed again in {status.audit_s:.3g} s"])
        if status.trouble:
            fate, where = "left out" if not status.healthy else "taken with zeros instead", ""
            if not status.clean:
                where = f" ({self.where() or 'no rank has them before the reduction'})"
            say([f"step {step + 1}: {fate}: {status.trouble}{where}"])
        record = StepRecord(
            step=step,
            loss=status.loss,
            bits_per_byte=bits_per_byte(status.nll_sum, status.target_bytes)
            if status.valid_tokens
            else math.nan,
            grad_norm=status.grad_norm,
            lr=self.launch.config.optim.lr * factor,
            tokens=status.tokens,
            valid_tokens=status.valid_tokens,
            tokens_per_s=status.tokens / step_s,
            step_s=step_s,
            peak_bytes=peak_memory_bytes(self.forensics.device),
            grad_accum=grad_accum,
            nonfinite=status.nonfinite,
            skipped=not status.healthy,
            mfu=self.mfu(status.tokens / step_s),
            more=self._further(status) | {"lr_groups": rates} | dict(figures),
        )
        self.log.write(record)
        say(self._compared(step_s))
        say(self.calibrator.after_step(status.healthy, self._full, self.forensics.seen))

    def must_go_back(self, step: int) -> bool:
        """Return whether the run must rewind after a step; every rank calls it, and gets the same.

        Raises:
            NonFiniteError: it must, and no rewind or no sound checkpoint is left.
        """
        return self.rewinds.due(self._differs or self.copies.difference(step))

    def go_back(self) -> None:
        """Load the last sound checkpoint, and skip the rows at fault; every rank calls it.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        with self.clock.span("checkpoint"):
            if self.state.mirror:
                self.state.mirror.drop()
            self.rewinds.go_back()

    def evaluate(self, step: int) -> float | None:
        """Record the held-out loss after a step, beside gzip's; return nats per valid token.

        None: no held-out label counts. Every rank calls it, and all get the same loss.
        """
        with self.clock.span("evaluation"):
            return self.held_out.evaluate(step)

    def run_tasks(self, step: int) -> None:
        """Record the figures of `run.tasks` after a step; every rank calls it.

        An evaluation that fails ends no run: a line names the tasks and the error.
        """
        with self.clock.span("evaluation"):
            figures = self.tasks.evaluate()
        if self.tasks.failed:
            self.log.warn([f"step {step + 1}: warning: {self.tasks.failed}"])
        else:
            self.log.tasks(step, figures)

    def _catch_up(self, step: int) -> None:
        """Make the evaluations after a step of this run that a stop came before."""
        run, folder, found = self.launch.config.run, self.launch.folder, [None, None]
        if self.rank == 0:
            names = "metrics.jsonl", "evaluations.jsonl"
            found = [rows_by_step(folder / name).get(step) for name in names]
        row, held_out = share(found, 0)
        if row and not held_out and due(run.eval_every, step):
            self.evaluate(step)
        if row and "tasks" not in row and due(run.tasks_every, step):
            self.run_tasks(step)

    def stopped(self, step: int) -> PreemptedError:
        """Close all records after the last step; return the error that ends a run told to stop."""
        self._close_log()
        return PreemptedError(f"stopped by {self.stop.heard or 'SIGTERM'} after step {step + 1}")

    def finish(self, model: nn.Module, loss: float | None) -> None:
        """Export the final weights, and a sample of them; every rank calls it.

        Args:
            model: model of this rank.
            loss: held-out loss in nats per valid token; None: no label counts.

        Raises:
            NonFiniteError: a weight or the held-out loss isn't finite, or the last step was bad.
        """
        bad, config = self.state.bad_steps, self.launch.config
        if bad and config.precision.dtype != "fp16":  # whose scale looks for its place so
            raise ended_badly(config, self.state.folder, bad)
        finish(model, self.launch.corpus, config, self.log, self.state.step, loss)
        if self.launch.config.run.tasks:
            self.run_tasks(self.state.step - 1)

    def close(self) -> None:
        """Close all records at the end of the run; every rank calls it."""
        self._close_log()
        self.clock.close()

    def _close_log(self) -> None:
        self.log.warn(self.profile.close())
        if self.state.mirror:
            self.state.mirror.drop()
        self.forensics.close(self.of_sum, self.launch.peers.size)
        self.log.close()

    def _compared(self, step_s: float) -> list[str]:
        """Return a line about predicted and measured steps, once, after `TEN` of them."""
        predicted = self.launch.predicted
        if predicted is None or len(self._steps) >= TEN:
            return []
        self._steps.append(step_s)
        if len(self._steps) < TEN:
            return []
        return [verdict(predicted.as_dict(), self._steps)]

    def _further(self, status: StepStatus) -> dict[str, float | Mapping[str, float] | None]:
        """Return figures that only some runs have."""
        compared = self.health.figures() if status.healthy else {}
        return {
            **{f"aux_{term}": value for term, value in status.auxiliary.items()},
            **compared,
            "aux_gradient_ratio": status.auxiliary_ratio,
            "loss_scale": status.loss_scale,
            "audit_s": status.audit_s,
            "loss_by_source": status.loss_by_source or None,
            **load_figures(status.loads),
        }


def due(every: int, step: int) -> bool:
    """Whether a thing that happens every `every` steps (0: never) happens after this one."""
    return every > 0 and (step + 1) % every == 0
