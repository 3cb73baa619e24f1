"""What a run must remember to go on as if it had never stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from megacpp.config import Config
from megacpp.errors import CheckpointError, config_error
from megacpp.state.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    read_extra,
    save_checkpoint,
)
from megacpp.state.rng import set_rng_state
from megacpp.state.tensors import model_tensors

# Settings that decide which numbers come out; stored with a checkpoint and compared on resume.
KEPT = ("model", "data", "optim", "precision")


class HasTensors(Protocol):
    """Optimizers whose whole state is tensors by name, sharded like the parameters."""

    def state_tensors(self) -> Mapping[str, Tensor]: ...


class TrainingState:
    """Model, optimizer, counters and generators of a run, saved and resumed as one.

    The data position is the step: batches are a pure function of (seed, step, row).

    Attributes:
        step: optimizer steps behind us, skipped ones included.
        updates: steps that moved the parameters; the learning rate follows these.
        changed: what a resumed run does differently, for its header.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: HasTensors,
        config: Config,
        data_fingerprint: str,
    ) -> None:
        self.folder, self.model, self.optimizers = folder, model, optimizers
        self.config, self.data_fingerprint = config, data_fingerprint
        self.step = self.updates = 0
        self.changed: list[str] = []

    def advance(self, updated: bool) -> None:
        """Counts one step."""
        self.step += 1
        self.updates += updated

    def save(self, keep: int) -> Path:
        """Saves a checkpoint of this step; every rank calls it."""
        extra = {
            "step": self.step,
            "updates": self.updates,
            "seed": self.config.run.seed,
            "data_fingerprint": self.data_fingerprint,
            "tokens_per_step": self.config.train.tokens_per_step,
            "config": {name: dataclasses.asdict(getattr(self.config, name)) for name in KEPT},
        }
        return save_checkpoint(self.folder, self.step, self._tensors(), extra, keep)

    def resume(self, source: str) -> None:
        """Loads the newest checkpoint (`auto`), none (`never`) or the folder `source`.

        Raises:
            CheckpointError: nothing usable at `source`, or it belongs to other data, another
                seed, batch or model.
        """
        if source == "never":
            return
        path = latest_checkpoint(self.folder) if source == "auto" else Path(source)
        if path is None:
            return
        self._check(path, read_extra(path))
        extra = load_checkpoint(path, self._tensors())
        self.step, self.updates = extra["step"], extra["updates"]
        if extra["rng"] is not None:
            set_rng_state(extra["rng"])

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": t for name, t in model_tensors(self.model).items()}
        state = self.optimizers.state_tensors()
        return tensors | {f"optim.{name}": t for name, t in state.items()}

    def _check(self, path: Path, extra: dict[str, Any]) -> None:
        """Settings under which the saved run would not be continued but silently changed."""
        if extra["step"] > self.config.run.steps:
            raise config_error(
                "run.steps",
                self.config.run.steps,
                f"{path} is at step {extra['step']} already",
                "ask for more steps, another --run.dir, or --checkpoint.resume never",
            )
        if extra["data_fingerprint"] != self.data_fingerprint:
            raise CheckpointError(
                f"data.path={self.config.data.path}: the corpus [{self.data_fingerprint}] is not "
                f"the one of {path} [{extra['data_fingerprint']}]. Fix: give the corpus that the "
                "run was started with, or another --run.dir."
            )
        now = {
            "run.seed": (self.config.run.seed, extra["seed"]),
            "data.seq_len": (self.config.data.seq_len, extra["config"]["data"]["seq_len"]),
            "train.tokens_per_step": (self.config.train.tokens_per_step, extra["tokens_per_step"]),
            "optim.name": (self.config.optim.name, extra["config"]["optim"]["name"]),
        }
        optim = dataclasses.asdict(self.config.optim)
        was = extra["config"]["optim"]
        self.changed = [
            f"optim.{key} changed from {was.get(key)} to {value} on resume"
            for key, value in optim.items()
            if value != was.get(key)
        ]
        model, saved = dataclasses.asdict(self.config.model), extra["config"]["model"]
        now |= {f"model.{k}": (value, saved.get(k)) for k, value in model.items()}
        for key, (mine, theirs) in now.items():
            if mine != theirs:
                raise CheckpointError(
                    f"{key}={mine}: {path} was saved with {theirs}. Fix: use that value, another "
                    "--run.dir, or --checkpoint.resume never."
                )
