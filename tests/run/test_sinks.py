"""Figures that TensorBoard and Weights & Biases receive, read back; a trace of some steps."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import os
import resource
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config, RunConfig
from megacpp.errors import ConfigError
from megacpp.run.metrics import MetricsLog
from megacpp.run.profiling import StepProfile
from megacpp.run.sinks import (
    TensorBoard,
    WeightsAndBiases,
    check_sinks,
    settings_of,
    tagged,
)
from megacpp.torch_extras import region
from tests.launch import forked
from tests.test_run import SMALL, records

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Four steps on two ranks, the third and the fourth of them traced."""
    folder = tmp_path_factory.mktemp("sinks") / "run"
    few = ["--run.steps", "4", "--run.eval-rows", "2", "--train.device-batch-size", "1"]
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    done = forked("tiny", *SMALL, *few, *paths, "--run.profile", "3:4", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_tensorboard_has_every_figure_the_settings_and_the_sample(run: tuple[Path, str]) -> None:
    folder, _ = run
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    tags = board.Tags()["scalars"]
    assert all(set(tag) <= set("abcdefghijklmnopqrstuvwxyz0123456789_/") for tag in tags), tags
    assert {"train/loss", "train/load_entropy/layer_2", "validation/bits_per_byte"} <= set(tags)
    rows = records(folder)
    rates = {tag.split("/")[-1] for tag in tags if tag.startswith("train/lr_groups/")}
    assert rates == set(rows[0]["lr_groups"]) and {"muon", "adamw_embed", "adamw_head"} <= rates
    for name in rates:
        shown = [event.value for event in board.Scalars(f"train/lr_groups/{name}")]
        assert shown == pytest.approx([row["lr_groups"][name] for row in rows], rel=1e-6)
    assert rows[0]["lr_groups"]["adamw_head"] == rows[0]["lr"]
    (text,) = board.Tensors("sample/text_summary")
    assert text.step == 3
    stored = (folder / "samples/step-000004.txt").read_text()
    shown = text.tensor_proto.string_val[0].decode()
    assert [line[4:] for line in shown.splitlines()] == stored.splitlines()
    content = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["run.steps"].number_value == 4
    assert settings["model.pattern"].string_value == "AMERF"
    assert len(settings) == len(settings_of(Config()))
    assert "_hparams_/session_end_info" not in board.summary_metadata, "it says how a run ended"


def test_a_log_closes_its_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    sinks = [SimpleNamespace(close=partial(closed.append, name)) for name in "ab"]
    monkeypatch.setattr("megacpp.run.metrics.open_sinks", lambda *_: sinks)
    MetricsLog(tmp_path, Config(run=RunConfig(steps=1)), 0, active=True).close()
    assert closed == ["a", "b"]


@pytest.mark.parametrize("begins", [0, 1])
def test_a_full_disk_ends_the_charts_alone(
    begins: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for the full disk; the writer has a thread of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = (begins << 12, before[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    try:
        sink = TensorBoard(tmp_path, {"run.steps": 4}, 0)
        for step in range(200):
            sink.scalars({f"train/{name}": 1.0 for name in "abcdefgh"}, step)
        sink.text("sample", "text", 200)
        sink.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = capsys.readouterr()
    assert out == f"warning: {tmp_path}/tensorboard: file too large; its charts end here\n"
    assert "Traceback" not in err


def test_a_trace_names_the_parts_of_its_steps(run: tuple[Path, str]) -> None:
    folder, out = run
    paths = sorted((folder / "profile").iterdir())
    assert [path.name for path in paths] == [f"steps-3-4-rank-{n}.json.gz" for n in (0, 1)]
    assert f"steps 3-4 were traced: {paths[0]}" in out and "ui.perfetto.dev" in out
    for path in paths:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"}
        parts = ["data", "accumulate", "forward", "backward", "clip", "check_step"]
        parts += ["Optimizer.step#MuonAdamW.step"]
        assert set(parts) <= set(spans), "the last of each, in the last step"
        steps = [name for name in spans if name.startswith("step ")]
        assert sorted(steps) == ["step 3", "step 4"]
        begin, end = spans["step 4"]
        for part in parts:
            assert begin <= spans[part][0] <= spans[part][1] <= end, part
        assert any(name.startswith("gloo:") or "c10d" in name for name in spans), "collectives"


def test_a_run_that_ends_early_writes_what_it_traced(tmp_path: Path) -> None:
    profile = StepProfile("2:9", tmp_path, 0, CPU)
    for step in range(3):
        profile.begin(step)
        with region("clip"):
            torch.ones(3).sum()
        assert profile.end(step) == []
    (line,) = profile.close()
    assert "steps 2-9 were traced" in line and profile.close() == []
    with gzip.open(tmp_path / "profile/steps-2-9-rank-0.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert "step 2" in names and "step 3" in names and "step 1" not in names
    assert names.count("clip") == 2


def test_other_ranks_than_the_first_are_not_traced(tmp_path: Path) -> None:
    profile = StepProfile("1", tmp_path, 8, CPU)
    profile.begin(0)
    assert profile.end(0) == [] and profile.close() == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--run.profile x",
            "run.profile=x: must be a step from 1 on, or two of them as FIRST:LAST",
        ),
        ("--run.profile 0", "run.profile=0: must be a step from 1 on"),
        ("--run.profile 5:4", "run.profile=5:4: must be a step from 1 on"),
        ("--run.profile 3:9 --run.steps 8", "the run has 8 steps. Fix: use --run.profile 8."),
    ],
)
def test_steps_that_cannot_be_traced(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(["tiny", *flags.split()], 1)
    assert said in str(error.value)


# ---- Weights & Biases ----------------------------------------------------------------------------

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="the extra `wandb` is not installed"
)
PROJECT = Config(run=RunConfig(wandb="a-project", steps=2, tensorboard=False))


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check_sinks(PROJECT)
    assert str(error.value) == (
        "run.wandb=a-project: the package wandb is not installed. "
        "Fix: pip install wandb, or --run.wandb ''."
    )
    check_sinks(Config())


@needs_wandb
def test_nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"no API key is known\. Fix: wandb login"):
        check_sinks(PROJECT)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_sinks(PROJECT)
    importlib.import_module("wandb").teardown()  # it has read its variables


def test_a_run_of_wandb_has_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    errors = SimpleNamespace(Error=RuntimeError)
    package = SimpleNamespace(init=lambda **k: given.append(k), Settings=dict, errors=errors)
    monkeypatch.setitem(sys.modules, "wandb", package)
    for _ in range(2):
        WeightsAndBiases(tmp_path / "run", {"optim.lr": 0.1}, "a-project")
    assert given[0] == given[1]  # a run that goes on has its id
    assert given[0]["name"] == "run" and given[0]["project"] == "a-project"
    assert given[0]["config"] == {"optim.lr": 0.1} and given[0]["dir"] == str(tmp_path / "run")


@needs_wandb
def test_an_offline_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    log = MetricsLog(tmp_path / "run", PROJECT, 0, active=True)
    log.evaluation(0, {"loss": 2.0, "bits_per_byte": 1.5, "target_bytes": 10, "complete": 1.0,
                       "gzip_bits_per_byte": 2.0})  # fmt: skip
    log.sample(1, "<b>int</b>")
    log.close()
    importlib.import_module("wandb").teardown()  # waits for the process that writes
    (folder,) = (tmp_path / "run/wandb").glob("offline-run-*")
    name = (tmp_path / "run/wandb/run-id").read_text()
    assert folder.name.endswith(f"-{name}") and (folder / f"run-{name}.wandb").stat().st_size > 0
    data = (folder / f"run-{name}.wandb").read_bytes()
    for word in (b"validation/bits_per_byte", b"a-project", b"optim.muon_lr", b"sample"):
        assert word in data, word
    MetricsLog(tmp_path / "run", PROJECT, 1, active=True).close()
    assert len(list((tmp_path / "run/wandb").glob(f"offline-run-*-{name}"))) >= 1


def test_tags_of_nested_figures() -> None:
    found = dict(tagged({"loss": 1, "skipped": True, "load": {"3": 0.5}, "no": None}, "train"))
    assert found == {"train/loss": 1.0, "train/skipped": 1.0, "train/load/layer_3": 0.5}
