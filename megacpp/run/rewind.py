"""Rewind: go back to a sound checkpoint and skip the rows that led to bad or spiking steps.

    rewinds.jsonl    {"from": 41, "to": 30, "streak": 3, "rows": [960, 1312], "why": ...}

PaLM went back some 100 steps and skipped 200 to 500 batches at each of its loss spikes (arXiv
2204.02311, section 5.1). The decision follows from numbers that all ranks agree on, and a start
that resumes from the same checkpoint skips the same rows again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.config.schema import Config
from megacpp.run.health import Health, budget_spent, no_labels
from megacpp.run.metrics import MetricsLog
from megacpp.state.agreement import share
from megacpp.state.checkpoint import damage, newest_sound
from megacpp.state.files import parsed, write_text
from megacpp.state.published import LATEST, candidates, latest_text, step_of
from megacpp.state.soundness import corrupt_state
from megacpp.state.training import TrainingState

FILE = "rewinds.jsonl"


@dataclass
class Rewinds:
    """Rewinds of a run, at most `train.rewinds` over all its starts.

    Args:
        folder: folder of the run.
        config: configuration of the run.
        state: state of the run, resumed.
        health: streak of spikes.
        log: records, of which repeated steps are dropped.
        is_main: this rank writes.
    """

    folder: Path
    config: Config
    state: TrainingState
    health: Health
    log: MetricsLog
    is_main: bool

    def __post_init__(self) -> None:
        self._target: Path | None = None
        self._differs, self._calm = "", -1
        self.made: list[dict[str, Any]] = share(_read(self.folder / FILE), 0)
        again = [one for one in self.made if one["to"] == self.state.step]
        if again and self.state.loader is not None:
            at = self.state.loader.position
            skipped = max((one["rows"][1] for one in again if one["rows"][0] == at), default=at)
            self.state.loader.skip_to(skipped)

    def due(self, differs: str = "") -> bool:
        """Return whether the run must go back now; the same on every rank.

        Args:
            differs: copies of a tensor that aren't equal (digests.py).

        Raises:
            NonFiniteError: it must, and no rewind or no sound checkpoint is left.
            CheckpointError: an asynchronous save failed.
            DataError: `train.max_skips` steps in a row had no label.
        """
        self._differs = differs
        if self.state.unlabelled >= self.config.train.max_skips:
            raise no_labels(self.config)
        train, left = self.config.train, self.config.train.rewinds - len(self.made)
        spent = self.state.bad_steps >= train.max_skips
        spiking = 0 < train.max_spikes <= self.health.spikes and left > 0
        if not self.state.bad_steps and not self.health.spikes:
            self._calm = self.state.step
        if not spent and not spiking and not differs:
            return False
        self.state.writer.wait()
        self._target = self._newest() if left > 0 else None
        if differs and self._target is None:
            raise corrupt_state(self.config, self.state.folder, self.state.step, differs)
        if spent and self._target is None:
            raise budget_spent(self.config, self.state.folder)
        return self._target is not None

    def go_back(self) -> None:
        """Load the checkpoint and continue at the rows behind those read; every rank calls it.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        state, path = self.state, self._target
        assert path is not None and state.loader is not None
        bad, spikes = state.bad_steps, self.health.spikes
        made, read = state.step, state.loader.position
        state.go_back(path)
        if self._differs:  # the same rows again: they aren't at fault
            read = state.loader.position
        rows, self.health.spikes = [state.loader.position, read], 0
        state.bad_steps, self._calm = 0, state.step
        state.loader.skip_to(read)
        streak = f"{bad} bad steps in a row" if bad else f"{spikes} spikes in a row"
        why = self._differs or streak
        one = {"from": made, "to": state.step, "streak": max(bad, spikes), "rows": rows}
        one |= {"why": why, "path": str(path)}
        self.made.append(one)
        if self.is_main:
            write_text(path.parent / LATEST, latest_text(path.name))  # later ones are given up
            with (self.folder / FILE).open("a") as file:
                file.write(json.dumps(one) + "\n")
            state.writer.saved(path)  # an upload names it as the latest at the URL, too
        self.log.go_back(state.step)
        left = self.config.train.rewinds - len(self.made)
        self.log.warn(
            [
                f"step {made}: {why}: back to {path}, "
                f"{f'rows {rows[0]} to {rows[1] - 1} are' if read > rows[0] else 'no row is'} "
                f"skipped ({left} rewinds left)"
            ]
        )

    def _newest(self) -> Path | None:
        """Return the newest sound checkpoint that may be gone back to.

        It is from before the streak, on the way that this run took, and no rewind has found it to
        be bad from its start. One that a stop saved in an earlier streak is as good as others: that
        streak was over by step `_calm`.
        """
        futile = {one["to"] for one in self.made if one["from"] - one["to"] <= one["streak"]}
        first = self.state.step - max(self.state.bad_steps, self.health.spikes)
        folder = self.state.folder
        found = newest_sound(folder, lambda step: step <= first and step not in futile)
        oldest = step_of(found) if found else -1
        nearer = (
            path
            for path in share(candidates(folder), 0)
            if oldest < (step := step_of(path)) < self._calm and step not in futile
        )
        return next((path for path in nearer if not damage(path)), found)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the recorded rewinds; unreadable lines are left out."""

    def whole(one: dict[str, Any]) -> bool:
        rows = one["rows"] if isinstance(one.get("rows"), list) else []
        numbers = [one.get("from"), one.get("to"), one.get("streak"), *rows]
        return len(numbers) == 5 and all(type(n) is int and n >= 0 for n in numbers)

    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [one for one in map(parsed, lines) if whole(one)]
