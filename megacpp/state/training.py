"""Training state of a run: everything needed to resume as if it had never stopped."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from megacpp.config.mix import data_setting
from megacpp.config.schema import (
    CheckpointingPolicy,
    Config,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
)
from megacpp.errors import CheckpointError, config_error
from megacpp.state.agreement import agreed, share
from megacpp.state.behind import SaveThread, host_copies
from megacpp.state.checkpoint import damage, load_checkpoint, save_checkpoint
from megacpp.state.files import flat
from megacpp.state.mirror import Mirror, open_mirror
from megacpp.state.published import (
    EXTRA,
    advice,
    candidates,
    latest_checkpoint,
    passed_over,
    path_of,
    read_extra,
)
from megacpp.state.rng import rng_state, set_rng_state
from megacpp.state.soundness import bad_state, unsound
from megacpp.state.tensors import model_tensors

if TYPE_CHECKING:
    from megacpp.data.loader import Loader

# Settings that decide which numbers come out; stored with a checkpoint and compared on resume.
KEPT = ("model", "data", "train", "optim", "precision", "recompute")
# Sections of these that a resumed run may change; its header reports the changes.
MAY_CHANGE = {
    "train": TrainConfig(),
    "optim": OptimConfig(),
    "precision": PrecisionConfig(),
    "recompute": CheckpointingPolicy(),
}
# Settings of how a step is split and computed; tokens_per_step is reported separately.
CUTS = ("train.device_batch_size", "train.tokens_per_step", "train.grad_accum", "train.device")
# Settings of a model that select another training stage of the same weights.
STAGES = tuple(f"model.attention.sparse.{name}" for name in ("stage", "top_k", "loss"))
AVERAGES = {"health"}  # counters that restart when a stage trains other parameters


class HasTensors(Protocol):
    """Optimizer whose whole state is tensors by name, sharded like the parameters.

    An entry of `state_tensors` is the live tensor, or a copy of a state that is stored in another
    form. Both are filled in place on resume and passed to `load_state_tensors`, which ignores live
    ones.
    """

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Return all state by name."""
        ...

    def load_state_tensors(self, state: Mapping[str, Tensor], /) -> None:
        """Load state with the names and shapes of `state_tensors`."""
        ...


class HasState(Protocol):
    """Counters of a run as JSON, equal on every rank: loss scale, running averages."""

    def state(self) -> dict[str, Any]:
        """Return the counters as JSON."""
        ...

    def restore(self, state: Any, /) -> None:
        """Restore counters from `state`."""
        ...


class TrainingState:
    """Model, optimizer, counters and generators of a run, saved and resumed together.

    Rows are a pure function of (seed, global row), so the data position is one number: the rows
    read so far. A changed number of tokens per step only groups the same rows differently.

    Args:
        folder: folder of checkpoints.
        model: model of this rank.
        optimizers: optimizer state.
        config: configuration of the run.
        data_fingerprint: fingerprint of the corpus.
        loader: saves and restores the data position; without a loader the step determines it, and
            changed tokens per step are rejected.
        others: further counters, by the name that they are saved under.

    Attributes:
        step: optimizer steps made, skipped ones included.
        updates: steps that changed the parameters; the learning rate follows these.
        bad_steps: consecutive steps that were skipped or had a non-finite value.
        unlabelled: as many without a label; not saved.
        resumed: checkpoint that this run started from or went back to.
        writer: asynchronous save in flight.
        mirror: copies in the nodes' memory; None: the run has none.
        changed: differences from the saved run, as lines for the header of a resumed run.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: HasTensors,
        config: Config,
        data_fingerprint: str,
        loader: Loader | None = None,
        others: Mapping[str, HasState] | None = None,
    ) -> None:
        self.folder, self.model, self.optimizers = folder, model, optimizers
        self.config, self.data_fingerprint = config, data_fingerprint
        self.loader, self.others = loader, dict(others or {})
        self.step = self.updates = self.bad_steps = self.unlabelled = 0
        self.resumed: Path | None = None
        self.writer = SaveThread()
        self.mirror: Mirror | None = None
        self.changed: list[str] = []

    def advance(self, updated: bool, good: bool | None) -> None:
        """Count a step that changed the parameters or not.

        `good`: it had no problem; None: without a label it changes no streak of bad steps.
        """
        self.step += 1
        self.updates += updated
        self.unlabelled = self.unlabelled + 1 if good is None else 0
        self.bad_steps = 0 if good else self.bad_steps + (good is not None)

    def save(self, keep: int, behind: bool = False) -> Path:
        """Save a checkpoint of this step, keeping `keep` sound ones; every rank calls it.

        An asynchronous save that is in flight is waited for.

        Args:
            keep: number of sound checkpoints to keep (0: all).
            behind: return once the state is copied to host memory; `checkpoint.async` writes the
                copy behind the steps.

        Raises:
            NonFiniteError: a parameter or a moment isn't finite, on any rank; nothing is written.
            CheckpointError: the disk is full or not writable, now or in the save before.
        """
        self.writer.wait()
        tensors = self.tensors()
        if words := unsound(tensors):
            raise bad_state(self.config, self.folder, self.step, f"after step {self.step} {words}")
        extra = self.extra()
        every, writer, group = self.config.checkpoint.keep_every, self.writer, None
        if behind := behind and self.config.checkpoint.async_:
            tensors, extra, group = host_copies(tensors), copy.deepcopy(extra), writer.group
        given = self.folder, self.step, tensors, extra, keep, every, rng_state(), group, writer.held
        if not behind:
            return writer.saved(save_checkpoint(*given, writer.seen))
        writer.start(lambda: writer.saved(save_checkpoint(*given, writer.seen)))
        return path_of(self.folder, self.step)

    def extra(self) -> dict[str, Any]:
        """Return the counters of a checkpoint, as JSON."""
        extra = {
            "step": self.step,
            "steps": self.config.run.steps,
            "updates": self.updates,
            "bad_steps": self.bad_steps,
            "others": {name: counters.state() for name, counters in self.others.items()},
            "seed": self.config.run.seed,
            "data_fingerprint": self.data_fingerprint,
            "tokens_per_step": self.config.train.tokens_per_step,
            "config": {name: dataclasses.asdict(getattr(self.config, name)) for name in KEPT},
        }
        if self.loader is not None:
            extra["rows"] = self.loader.position
        return extra

    def resume(self, source: str) -> None:
        """Load the newest checkpoint (`auto`), none (`never`) or the folder `source`.

        Raises:
            ConfigError: `source` isn't a folder, or is at a later step than the run's last.
            CheckpointError: nothing usable at `source`, or it belongs to other data, another seed,
                row length or model.
        """
        mirror = self.mirror = open_mirror(self.config, self.folder.parent)
        if source == "never" or (source == "auto" and mirror and self._from_mirror(mirror)):
            return
        if source != "auto" and not Path(source).is_dir():
            newest = latest_checkpoint(self.folder)
            legal = "auto, never or the folder of a checkpoint"
            such = f" such as {newest}" if newest else ""
            raise config_error("checkpoint.resume", source, "no such folder", f"use {legal}{such}")
        path = self._undamaged(source)
        if path is None:
            return
        with agreed(f"{path / EXTRA}: isn't of a run like this", advice(path)):
            saved = _complete(read_extra(path))
        self._check(path, saved)
        self._load(path, verified=True)

    def go_back(self, path: Path) -> None:
        """Load a checkpoint of this run again, on the same ranks; every rank calls it.

        Raises:
            CheckpointError: it is damaged.
        """
        self._load(path, verified=False)

    def _from_mirror(self, mirror: Mirror) -> bool:
        """Load a mirror that is newer than every checkpoint; return whether there is one."""
        state = self.optimizers.state_tensors()
        tensors = self.tensors(state)
        if (extra := mirror.newest(self.folder, tensors)) is None:
            return False
        self._check(mirror.folder, extra)
        self._take(mirror.folder, state, tensors, extra)
        self.changed.append(f"step {self.step} comes from the nodes' memory: {mirror.folder}")
        return True

    def _load(self, path: Path, verified: bool) -> None:
        """Load a checkpoint; its files are verified first unless they are already."""
        state = self.optimizers.state_tensors()
        tensors = self.tensors(state)
        self._take(path, state, tensors, load_checkpoint(path, tensors, verified=verified))

    def _take(
        self,
        path: Path,
        state: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        extra: Mapping[str, Any],
    ) -> None:
        """Go on from tensors that are loaded from `path`, and its counters."""
        if words := unsound(tensors):
            raise CheckpointError(f"{path}: {words}. Fix: {advice(path)}.")
        with agreed(f"{path / EXTRA}: isn't of a run like this", advice(path)):
            self.optimizers.load_state_tensors(state)
            self._restore(extra)
        self.resumed = path

    def _restore(self, extra: Mapping[str, Any]) -> None:
        """Restore counters, data position and generators."""
        self.step, self.updates = extra["step"], extra["updates"]
        self.bad_steps = extra.get("bad_steps", 0)
        if self.loader is not None:
            self.loader.skip_to(_rows_read(extra))
        for name, saved in extra.get("others", {}).items():
            if name in self.others and not (name in AVERAGES and self._other_stage(extra)):
                self.others[name].restore(saved)
        if extra["rng"] is not None:
            set_rng_state(extra["rng"])

    def _undamaged(self, source: str) -> Path | None:
        """Return the checkpoint to load, after its files are verified; every rank gets rank 0's.

        With `checkpoint.damaged older` damaged ones are passed over, each with a line.
        """
        found = share(candidates(self.folder) if source == "auto" else [Path(source)], 0)
        passed: list[str] = []
        for path in found:
            problem = damage(path)
            if not problem:
                over = passed_over(self.folder, path) if source == "auto" and not passed else []
                self.changed = [f"{line}: the run goes on from {path}" for line in passed]
                self.changed += share(over, 0)
                return path
            if self.config.checkpoint.damaged == "stop" or path == found[-1]:
                raise CheckpointError(f"{problem}. Fix: {advice(path)}.")
            passed.append(problem)
        self.changed = share(passed_over(self.folder, None) if source == "auto" else [], 0)
        return None

    def tensors(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return all saved tensors of this rank, by their names in a checkpoint."""
        state = self.optimizers.state_tensors() if state is None else state
        tensors = {f"model.{name}": t for name, t in model_tensors(self.model).items()}
        return tensors | {f"optim.{name}": t for name, t in state.items()}

    def _check(self, path: Path, extra: dict[str, Any]) -> None:
        """Reject settings under which the saved run would silently change instead of continue."""
        run = self.config.run
        if extra["step"] > (last := run.until or run.steps):
            raise config_error(
                "run.until" if run.until else "run.steps",
                last,
                f"{path} is at step {extra['step']} already",
                "ask for more steps, another --run.dir, or --checkpoint.resume never",
            )
        if extra["data_fingerprint"] != self.data_fingerprint:
            raise CheckpointError(
                f"{data_setting(self.config.data)}: the corpus [{self.data_fingerprint}] is not "
                f"the one of {path} [{extra['data_fingerprint']}]. Fix: give the corpus that the "
                "run was started with, or another --run.dir."
            )
        now = {
            "run.seed": (self.config.run.seed, extra["seed"]),
            "data.seq_len": (self.config.data.seq_len, extra["config"]["data"]["seq_len"]),
            "optim.name": (self.config.optim.name, extra["config"]["optim"]["name"]),
        }
        policy = dataclasses.asdict(CheckpointingPolicy()) | extra["config"].get("recompute", {})
        if self.config.recompute.compress or policy["compress"]:  # moments fit one projection only
            for key in ("compress", "compress_redraw"):
                now[f"recompute.{key}"] = (getattr(self.config.recompute, key), policy[key])
        if self.loader is None:  # the step alone doesn't determine the rows read
            tokens = self.config.train.tokens_per_step
            now["train.tokens_per_step"] = (tokens, extra["tokens_per_step"])
        model, saved = _settings_of(self.config.model), _saved_model(extra)
        now |= {k: (model.get(k), saved.get(k)) for k in (*model, *saved) if k not in STAGES}
        for key, (mine, theirs) in now.items():
            if mine != theirs:
                raise CheckpointError(
                    f"{key}={mine}: {path} was saved with {theirs}. Fix: use that value, another "
                    "--run.dir, or --checkpoint.resume never."
                )
        self.changed += self._changes(path, extra)

    def _other_stage(self, extra: Mapping[str, Any]) -> bool:
        stage = self.config.model.attention.sparse.stage
        return _saved_model(extra)["model.attention.sparse.stage"] != stage

    def _changes(self, path: Path, extra: dict[str, Any]) -> list[str]:
        """Return lines for settings that differ from the saved run.

        A setting that the checkpoint doesn't know had the effect of today's default.
        """
        lines = []
        before, now = extra.get("steps", self.config.run.steps), self.config.run.steps
        if before != now:
            lines.append(
                f"run.steps changed from {before} to {now} on resume, the learning rate follows it"
            )
        before, now = extra["config"]["data"].get("mix", ""), self.config.data.mix
        if before != now:
            lines.append(f"data.mix changed from {before} to {now} on resume, rows go on")
        before, now = extra["tokens_per_step"], self.config.train.tokens_per_step
        if before != now:
            lines.append(
                f"train.tokens_per_step changed from {before} to {now} on resume, "
                f"data go on at row {_rows_read(extra)}"
            )
        for section, default in MAY_CHANGE.items():
            was = dataclasses.asdict(default) | extra["config"].get(section, {})
            for key, value in dataclasses.asdict(getattr(self.config, section)).items():
                name = f"{section}.{key}"
                if value != was[key] and name not in CUTS:
                    lines.append(f"{name} changed from {was[key]} to {value} on resume")
        model, then = _settings_of(self.config.model), _saved_model(extra)
        lines += [
            f"{key} changed from {then[key]} to {model[key]} on resume"
            for key in STAGES
            if model[key] != then[key]
        ]
        if self._other_stage(extra):
            lines += [
                f"{name}: starts anew with the stage" for name in AVERAGES & self.others.keys()
            ]
        saved = extra.get("others", {})
        lines += [f"{n}: {path} has none, it starts anew" for n in self.others if n not in saved]
        lines += [f"{n}: saved in {path}, of no use now" for n in saved if n not in self.others]
        return lines


def _complete(extra: dict[str, Any]) -> dict[str, Any]:
    """Return a saved `extra` that has everything that a resumed run reads.

    Raises:
        KeyError, TypeError: something is missing or of another type.
    """
    config = extra["config"]
    lacks = {"step", "updates", "seed", "data_fingerprint", "tokens_per_step"} - extra.keys()
    if lacks or "seq_len" not in config["data"] or "name" not in config["optim"]:
        raise KeyError(*lacks, "config")
    for section in ("model", *MAY_CHANGE):
        if not isinstance(config.get(section, {}), Mapping):
            raise TypeError(f"config.{section} is no object of settings")
    return extra


def _saved_model(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved model, with today's default for settings that it lacks."""
    return _settings_of(ModelConfig()) | flat(extra["config"]["model"], "model.")


def _settings_of(model: ModelConfig) -> dict[str, Any]:
    return flat(dataclasses.asdict(model), "model.")


def _rows_read(extra: Mapping[str, Any]) -> int:
    """Return the global rows behind a checkpoint; without a count, from equal steps."""
    if "rows" in extra:
        return extra["rows"]
    return extra["step"] * (extra["tokens_per_step"] // extra["config"]["data"]["seq_len"])
