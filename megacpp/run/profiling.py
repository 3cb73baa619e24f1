"""Profile of some steps as a trace for Perfetto or chrome://tracing.

    --run.profile 10:12     # RUN/profile/steps-10-12-rank-0.json.gz, ... of the first ranks

The trace names the parts of a step: `data`, `accumulate`, `forward`, `backward`, `clip`,
`Optimizer.step`, `check_step`. On meshes FSDP2 adds `FSDP::` regions by module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megacpp.config.checks.every import profiled_steps

RANKS = 8  # number of ranks that write a trace


class StepProfile:
    """Trace of the steps in `run.profile`, counted from 1 as on the screen.

    Args:
        steps: `10`, `10:12`, or nothing.
        folder: folder of the run.
        rank: this rank; only the first ranks write a trace.
        device: device of this rank.
    """

    def __init__(self, steps: str, folder: Path, rank: int, device: torch.device) -> None:
        self.first, self.last = profiled_steps(steps) if steps and rank < RANKS else (0, -1)
        self.folder, self.rank, self.device = folder / "profile", rank, device
        self._profiler: Any = None
        self._step: Any = None

    def begin(self, step: int) -> None:
        """Start the trace of a step (the first is 0)."""
        if not self.first <= step + 1 <= self.last:
            return
        if self._profiler is None:
            from torch.profiler import ProfilerActivity, profile

            found = [ProfilerActivity.CPU]
            found += [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profiler = profile(activities=found, record_shapes=True)
            self._profiler.start()
        self._step = torch.profiler.record_function(f"step {step + 1}")
        self._step.__enter__()

    def end(self, step: int) -> list[str]:
        """End the trace of a step.

        Returns:
            A line that names the file, after the last of the steps.
        """
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._profiler is None or step + 1 < self.last:
            return []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._profiler.stop()
        return [self._write()]

    def close(self) -> list[str]:
        """Write the trace of a run that ended early."""
        if self._profiler is None:
            return []
        self._profiler.stop()
        return [self._write()]

    def _write(self) -> str:
        profiler, self._profiler = self._profiler, None
        span = f"{self.first}-{self.last}"
        path = self.folder / f"steps-{span}-rank-{self.rank}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk is no reason to stop training
            return f"run.profile={span}: no trace was written ({error})"
        return f"steps {span} were traced: {path} (open it in https://ui.perfetto.dev)"
