"""Training runs of variants of the tiny hybrid: `train.py` in a process and a folder of each."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class VariantRun(ABC):
    """Training run of one variant and seed.

    Attributes:
        RUNS: folder of all runs.
    """

    variant: str
    seed: int
    steps: int
    eval_rows: int = 256

    RUNS: ClassVar[Path]

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.RUNS / f"{self.variant.replace(' ', '-')}-{self.seed}"

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings of the variant."""

    @abstractmethod
    def figures(self, steps: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
        """Return what is compared, from the records of steps and of the last evaluation."""

    def command(self) -> list[str]:
        """Return the command of the run."""
        settings = self.settings() | {
            "run.dir": self.folder,
            "run.seed": self.seed,
            "run.steps": self.steps,
            "run.eval_rows": self.eval_rows,
            "run.sample_tokens": 1,
            "run.tensorboard": False,
            "checkpoint.every": 0,
            "memory.calibration": "",
        }
        return [sys.executable, "train.py", "tiny", *words(settings)]


def words(settings: dict[str, Any]) -> list[str]:
    """Return settings as they are typed."""
    return [f"--{key}={value}" for key, value in settings.items()]


def train(run: VariantRun) -> dict[str, Any]:
    """Return the figures of a run; run it unless they are stored."""
    stored, command = run.folder / "figures.json", run.command()
    if stored.exists():
        old = json.loads(stored.read_text())
        if old["command"] == command[1:]:
            return old
    began, environment = time.perf_counter(), {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{run.variant}, seed {run.seed}: {done.stderr.strip()[-600:]}")
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    last = json.loads((run.folder / "evaluations.jsonl").read_text().splitlines()[-1])
    figures = {
        "command": command[1:],
        "variant": run.variant,
        "seed": run.seed,
        **run.figures(steps, last),
        "tokens": sum(step["tokens"] for step in steps),
        "skipped": sum(step["skipped"] for step in steps),
        "wall_s": time.perf_counter() - began,
    }
    stored.write_text(json.dumps(figures))
    return figures


def trained(
    plan: Sequence[VariantRun], words: Callable[[dict[str, Any]], str], jobs: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each run, and print a line: `words` about them, and the time left."""
    began = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        for number, figures in enumerate(pool.map(train, plan), 1):
            left = (time.perf_counter() - began) / number * (len(plan) - number)
            print(
                f"{number:3}/{len(plan)}  {figures['variant']:20} seed {figures['seed']}  "
                f"{words(figures)}  eta {left / 60:.0f} min",
                flush=True,
            )
            yield {k: v for k, v in figures.items() if k != "command"}


def by_variant(record: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the runs of a record by variant and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in record["runs"]:
        found.setdefault(run["variant"], {})[run["seed"]] = run
    return found


def made_with() -> dict[str, Any]:
    """Return where and with what the figures are made."""
    from megacpp.launch.record import git_commit

    return {
        "machine": platform.processor() or platform.machine(),
        "torch": version("torch"),
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
