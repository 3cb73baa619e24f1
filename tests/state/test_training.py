"""Contents of a checkpoint besides tensors: the data position, streaks, other counters.

One process and a toy model; test_resume.py compares the numbers of a resumed run.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megacpp.config.batch_schedule import BatchSchedule, batch_schedule
from megacpp.config.checks.every import resolve
from megacpp.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from megacpp.data.batches import Batch
from megacpp.data.loader import Loader
from megacpp.errors import CheckpointError, ConfigError
from megacpp.run.health import Health
from megacpp.state.manifest import hash_file, read_manifest, write_manifest
from megacpp.state.training import TrainingState
from tests.state.toy import toy_model
from tests.synthetic import ragged_batch

SEQ_LEN = 12


class NoTensors:
    """Optimizer without a state."""

    def state_tensors(self) -> Mapping[str, Tensor]:
        return {}

    def load_state_tensors(self, state: Mapping[str, Tensor], /) -> None:
        assert not state


class Rows:
    """Ragged rows by global number; keeps which ones were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def changes_at(self, step: int, /) -> bool:
        return False

    def train_batch(self, rows: Sequence[int], /) -> Batch:
        self.read += rows
        return ragged_batch(rows, SEQ_LEN)


class Halving:
    """Counter of another object."""

    def __init__(self, value: float = 65536.0) -> None:
        self.value = value

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def restore(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def config_of(device_batch: int = 2, accum: int = 4, **train: Any) -> Config:
    given = TrainConfig(device_batch_size=device_batch, grad_accum=accum, **train)
    return resolve(Config(train=given, data=DataConfig(seq_len=SEQ_LEN)), world_size=1)


@dataclasses.dataclass
class Made:
    """Run as `train.py` composes it, with nothing to train."""

    state: TrainingState
    rows: Rows
    loader: Loader
    schedule: BatchSchedule

    def steps(self, n: int, updated: bool = True) -> None:
        for _ in range(n):
            for _ in self.loader.take(self.schedule.accum(self.state.step)):
                pass
            self.state.advance(updated, good=updated)


def make(folder: Path, config: Config, seed: int = 1, **others: Any) -> Made:
    rows = Rows()
    loader = Loader(rows, 0, 1, config.train.device_batch_size)
    model: nn.Module = toy_model(seed)
    state = TrainingState(folder, model, NoTensors(), config, "corpus", loader, others)
    return Made(state, rows, loader, batch_schedule(config, 1)[0])


def extra_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "extra.json").read_text())["extra"]


def test_the_position_is_saved_in_rows(tmp_path: Path) -> None:
    run = make(tmp_path, config_of())
    run.steps(3)
    path = run.state.save(keep=1)
    assert extra_of(path)["rows"] == run.loader.position == 24
    again = make(tmp_path, config_of(), seed=2)
    again.state.resume("auto")
    assert (again.state.step, again.loader.position, again.state.changed) == (3, 24, [])
    assert again.loader.microbatches == 0
    for a, b in zip(run.state.model.parameters(), again.state.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_generators_go_on_where_they_were_saved(tmp_path: Path) -> None:
    def draws() -> list[float]:
        return [torch.rand(()).item(), np.random.random(), random.random()]

    make(tmp_path, config_of()).state.save(keep=1)
    expected = draws()
    assert draws() != expected
    make(tmp_path, config_of()).state.resume("auto")
    assert draws() == expected


def test_another_length_is_announced_for_the_learning_rate_follows_it(tmp_path: Path) -> None:
    config = config_of()
    make(tmp_path, config).state.save(keep=1)
    longer = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=7))
    again = make(tmp_path, longer)
    again.state.resume("auto")
    before = config.run.steps
    assert again.state.changed == [
        f"run.steps changed from {before} to 7 on resume, the learning rate follows it"
    ]


@pytest.mark.parametrize("key", ["steps", "until"])
def test_a_run_that_is_further_already_is_a_mistake(tmp_path: Path, key: str) -> None:
    config = config_of()
    first = make(tmp_path, config)
    first.steps(3)
    first.state.save(keep=1)
    shorter = dataclasses.replace(config, run=dataclasses.replace(config.run, **{key: 2}))
    with pytest.raises(ConfigError, match=rf"run\.{key}=2: .*step-000003 is at step 3 already"):
        make(tmp_path, shorter).state.resume("auto")


def test_a_folder_that_is_not_there_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    run = make(tmp_path, config_of())
    legal = "Fix: use auto, never or the folder of a checkpoint"
    with pytest.raises(ConfigError) as found:
        run.state.resume("newest")
    assert str(found.value) == f"checkpoint.resume=newest: no such folder. {legal}."
    saved = run.state.save(keep=1)
    with pytest.raises(ConfigError) as found:
        run.state.resume("newest")
    assert str(found.value).endswith(f"{legal} such as {saved}.")


def test_a_later_folder_that_lost_its_manifest_is_announced(tmp_path: Path) -> None:
    """Else a run would go on from an older step, or start anew, and nothing would say why."""
    run = make(tmp_path, config_of())
    saved = []
    for _ in range(2):
        run.steps(1)
        saved.append(run.state.save(keep=0))
    for expected, path in ((1, saved[1]), (0, saved[0])):
        (path / "manifest.json").unlink()
        again = make(tmp_path, config_of())
        again.state.resume("auto")
        lost = [p for p in saved if not (p / "manifest.json").exists()]
        assert again.state.step == expected
        assert again.state.changed == [f"{p} is passed over: it has no manifest.json" for p in lost]


@pytest.mark.parametrize(("device_batch", "accum"), [(2, 1), (2, 7), (1, 8), (8, 1), (3, 5)])
def test_other_tokens_a_step_go_on_at_the_next_row(
    tmp_path: Path, device_batch: int, accum: int
) -> None:
    """Twice in a row, so that the step no longer tells the position."""
    first = make(tmp_path, config_of())
    first.steps(3)
    first.state.save(keep=1)
    second = make(tmp_path, config_of(device_batch, accum))
    second.state.resume("auto")
    tokens = device_batch * accum * SEQ_LEN
    assert second.state.changed == (
        [f"train.tokens_per_step changed from 96 to {tokens} on resume, data go on at row 24"]
        if tokens != 96
        else []
    )
    second.steps(2)
    second.state.save(keep=1)
    third = make(tmp_path, config_of())
    third.state.resume("auto")
    third.steps(2)
    read = first.rows.read + second.rows.read + third.rows.read
    assert read == list(range(24 + 2 * device_batch * accum + 16))
    assert third.state.step == 7


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_batch_warmup_is_resumed(tmp_path: Path, stop: int) -> None:
    config = config_of(accum=16, batch_warmup_steps=6)
    straight = make(tmp_path / "straight", config)
    straight.steps(12)
    first = make(tmp_path / "run", config)
    first.steps(stop)
    first.state.save(keep=1)
    second = make(tmp_path / "run", config)
    second.state.resume("auto")
    assert second.loader.position == second.schedule.rows_before(stop)
    second.steps(12 - stop)
    assert first.rows.read + second.rows.read == straight.rows.read
    assert second.state.changed == []
    other = make(tmp_path / "run", config_of(accum=16, batch_warmup_steps=8))
    other.state.resume("auto")
    assert other.state.changed == ["train.batch_warmup_steps changed from 6 to 8 on resume"]
    assert other.loader.position == second.schedule.rows_before(stop)


def without(path: Path, *names: str) -> None:
    """Makes of a checkpoint what an earlier version would have written."""
    file = path / "extra.json"
    state = json.loads(file.read_text())
    for name in names:
        del state["extra"][name]
    state["extra"]["config"].pop("train", None)
    state["extra"]["config"]["optim"].pop("embed_lr")
    file.write_text(json.dumps(state))
    manifest = read_manifest(path, "checkpoint")
    write_manifest(
        path,
        dataclasses.replace(manifest, files={**manifest.files, file.name: hash_file(file)}),
    )


def test_a_checkpoint_without_rows(tmp_path: Path) -> None:
    """Its steps were all equal: as many rows each as its tokens a step make."""
    run = make(tmp_path, config_of())
    run.steps(5)
    without(run.state.save(keep=1), "rows", "bad_steps", "others")
    again = make(tmp_path, config_of(), health=Health())
    again.state.resume("auto")
    assert (again.state.step, again.loader.position, again.state.bad_steps) == (5, 40, 0)
    assert again.state.changed == [f"health: {tmp_path / 'step-000005'} has none, it starts anew"]
    other = make(tmp_path, config_of(device_batch=4, accum=4))
    other.state.resume("auto")
    assert other.loader.position == 40
    assert other.state.changed == [
        "train.tokens_per_step changed from 96 to 192 on resume, data go on at row 40"
    ]


def test_a_streak_of_skipped_steps_goes_on(tmp_path: Path) -> None:
    run = make(tmp_path, config_of())
    run.steps(2)
    run.steps(3, updated=False)
    assert (run.state.step, run.state.updates, run.state.bad_steps) == (5, 2, 3)
    run.state.save(keep=1)
    again = make(tmp_path, config_of())
    again.state.resume("auto")
    assert (again.state.step, again.state.updates, again.state.bad_steps) == (5, 2, 3)
    again.steps(1, updated=False)
    assert again.state.bad_steps == 4
    again.steps(1)
    assert (again.state.bad_steps, again.state.updates) == (0, 3)


def test_counters_of_others(tmp_path: Path) -> None:
    health, scale = Health(), Halving(1 / 3)
    for step in range(40):
        health.observe(step, 3.0 + 0.1 * (step % 3), 1.0 + 0.3 * (step % 5))
    run = make(tmp_path, config_of(), health=health, loss_scale=scale)
    run.state.save(keep=1)
    new_health, new_scale = Health(), Halving()
    again = make(tmp_path, config_of(), health=new_health, loss_scale=new_scale)
    again.state.resume("auto")
    assert new_health.state() == health.state() and new_scale.value == 1 / 3
    assert again.state.changed == []
    assert new_health.observe(40, 9.0, 50.0) == health.observe(40, 9.0, 50.0) != []


def test_counters_that_come_and_go_are_named(tmp_path: Path) -> None:
    run = make(tmp_path, config_of(), loss_scale=Halving(2.0))
    path = run.state.save(keep=1)
    health = Health()
    again = make(tmp_path, config_of(), health=health)
    again.state.resume("auto")
    assert again.state.changed == [
        f"health: {path} has none, it starts anew",
        f"loss_scale: saved in {path}, of no use now",
    ]
    assert health.state() == Health().state()


def with_seq_len(config: Config) -> Config:
    return dataclasses.replace(config, data=DataConfig(seq_len=SEQ_LEN + 1))


def with_seed(config: Config) -> Config:
    return dataclasses.replace(config, run=RunConfig(seed=7))


def with_model(config: Config) -> Config:
    return dataclasses.replace(config, model=ModelConfig(dim=64))


def with_optimizer(config: Config) -> Config:
    return dataclasses.replace(config, optim=OptimConfig(name="adamw"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_seq_len, "data.seq_len=13: "),
        (with_seed, "run.seed=7: "),
        (with_model, "model.dim=64: "),
        (with_optimizer, "optim.name=adamw: "),
    ],
)
def test_what_must_match(tmp_path: Path, change: Any, words: str) -> None:
    run = make(tmp_path, config_of())
    run.steps(2)
    run.state.save(keep=1)
    other = make(tmp_path, change(config_of()))
    with pytest.raises(CheckpointError) as caught:
        other.state.resume("auto")
    line = str(caught.value)
    assert line.startswith(words) and "Fix: " in line and "\n" not in line
    assert (other.state.step, other.loader.position) == (0, 0)


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    make(tmp_path, config_of()).state.save(keep=1)
    other = make(tmp_path, config_of())
    other.state.data_fingerprint = "other"
    with pytest.raises(CheckpointError, match=r"the corpus \[other\] is not the one of "):
        other.state.resume("auto")


def test_without_a_loader_other_tokens_a_step_are_refused(tmp_path: Path) -> None:
    """Nobody would set the position of the data."""
    bare = TrainingState(tmp_path, toy_model(1), NoTensors(), config_of(), "corpus")
    assert "rows" not in extra_of(bare.save(keep=1))
    other = TrainingState(tmp_path, toy_model(1), NoTensors(), config_of(accum=2), "corpus")
    with pytest.raises(CheckpointError, match=r"^train\.tokens_per_step=48: .* saved with 96"):
        other.resume("auto")
    bare.resume("auto")
