"""Replays make recorded steps again: equal to the last bit, or said to differ."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megacpp.cli import replay as command
from megacpp.cli.main import main
from megacpp.cli.weights import held_out_documents
from megacpp.launch.command import command_words
from megacpp.state.files import flat
from tests.launch import forked, watched
from tests.test_run import SMALL

FLAGS = "--model.depth 2 --model.pattern ME --run.steps 8 --run.digest-every 2 --run.eval-rows 4"
FLAGS += " --checkpoint.every 3 --run.sample-tokens 0 --train.tokens-per-step 192"


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    own = ["--data.path", str(corpus), "--run.dir", str(folder)]
    own += ["--train.device-batch-size", "2", "--precision.dtype", "fp64"]
    done = forked("tiny", *SMALL, *FLAGS.split(), *own, ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


def test_as_typed(run: Path) -> None:
    """With an agent and ranks in new interpreters."""
    words = ["replay", str(run), "--from", "3", "--steps", "2"]
    done = watched([sys.executable, "-m", "megacpp", *words])
    assert done.returncode == 0, done.stderr
    assert f"2 of 2 steps from {run}/checkpoints/step-000003 are equal bit for bit" in done.stdout


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(flags: list[str], ranks: int, folder: Path) -> None:
        assert folder == Path()
        done = forked(*flags, ranks=ranks)
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(command, "_run", run)


@pytest.mark.usefixtures("forks")
def test_the_same_mesh_is_the_same_bits_and_a_changed_record_is_seen(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["replay", str(run), "--from", "3", "--steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "4 of 4 steps from " in said
    assert "are equal bit for bit: loss, gradient norm, 2 digests" in said
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}

    metrics, digests = run / "metrics.jsonl", run / "digests.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[4]["loss"] += 1e-15 * 8
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    wrong = json.loads(digests.read_text().splitlines()[3])
    digests.write_text(digests.read_text().replace(wrong["digest"], "0" * 16))
    assert main(["replay", str(run), "--from", "3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert wrong["step"] == 5 and found["differing"] == [4, 5]


@pytest.mark.usefixtures("forks")
def test_settings_are_those_of_the_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check those of its own record; among them may be one that the preset doesn't have."""
    config = json.loads((run / "launch.json").read_text())["config"]
    config["model"]["attention"]["yarn"] = {"original_seq_len": 16}
    assert "--model.attention.yarn.original-seq-len=16" in command_words(
        config["preset"], flat(config)
    )
    changed = json.loads((run / "config.json").read_text())
    changed["config"]["run"]["steps"] = 99  # of a later start
    (run / "config.json").write_text(json.dumps(changed))
    assert main(["replay", str(run)]) == 0
    assert f"2 of 2 steps from {run}/checkpoints/step-000006" in capsys.readouterr().out


@pytest.mark.usefixtures("forks")
def test_a_relative_corpus_is_found_from_any_folder(
    run: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is below the folder in which the run was started, which an older record lacks."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    launch, config = (json.loads((folder / f"{n}.json").read_text()) for n in ("launch", "config"))
    assert launch["folder"] == os.getcwd()
    for content, name in ((launch, "launch"), (config, "config")):
        content["config"]["data"]["path"] = corpus.name
        content["folder"] = str(corpus.parent)
        (folder / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    words = ["replay", str(folder), "--from", "3", "--steps", "1"]
    assert main(words) == 0 and "1 of 1 steps from " in capsys.readouterr().out
    assert next(held_out_documents(folder))
    del launch["folder"]
    (folder / "launch.json").write_text(json.dumps(launch))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"data.path={corpus.name}: no such folder here; it is relative to where the run" in said
    assert "Fix: replay from there, or add --data.path FOLDER." in said
    assert main([*words, "--data.path", str(corpus)]) == 0


@pytest.mark.usefixtures("forks")
def test_another_mesh_is_equal_to_the_tolerance(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["--nproc", "1", "--mesh.dp-shard", "1", "--train.grad-accum", "2"]
    assert main(["replay", str(run), "--from", "3", "--steps", "1", *other]) == 0
    assert "1 of 1 steps" in capsys.readouterr().out
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for away, code in ((1e-8, 1), (0.0, 0)):  # the tolerance is between 1e-15 and this
        changed = [*lines[:3], {**lines[3], "loss": lines[3]["loss"] * (1 + away)}, *lines[4:]]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in changed))
        assert main(["replay", str(run), "--from", "3", "--steps", "1", *other]) == code
    capsys.readouterr()
    assert main(["replay", str(run), "--from", "4"]) == 2
    assert "has no such checkpoint. Fix: use one of 3, 6." in capsys.readouterr().err
    assert main(["replay", str(run), "--from", "8"]) == 2
    assert "no step after it is recorded. Fix: use one of 3, 6." in capsys.readouterr().err
    assert main(["replay", str(run / "none"), "--from", "3"]) == 2
    assert f"run={run}/none: no such run folder" in capsys.readouterr().err
    launch = json.loads((run / "launch.json").read_text())
    (run / "launch.json").write_text(json.dumps(launch | {"schema": 99}))
    capsys.readouterr()
    assert main(["replay", str(run), "--from", "3"]) == 3
    assert "schema is 99" in capsys.readouterr().err
    (run / "launch.json").unlink()
    assert main(["replay", str(run), "--from", "3"]) == 2
    assert "has no launch.json. Fix: give the folder of a run." in capsys.readouterr().err


STARTS: list[dict[str, Any]] = [
    {"started": "2026-01-01T10", "world_size": 2},
    {"started": "2026-01-01T12", "world_size": 1, "first_step": 4},
    {"started": "2026-01-01T11", "world_size": 4, "first_step": 6},
]


def test_steps_are_those_of_the_last_start_that_made_them(tmp_path: Path) -> None:
    """A start from step 6 that a later one, from step 4, has made in vain."""
    for n, content in enumerate(STARTS):
        name = f"launch-{content['first_step']:06d}.json" if n else "launch.json"
        (tmp_path / name).write_text(json.dumps(content))
    starts = command._starts(tmp_path)
    assert [one["world_size"] for one in starts] == [2, 4, 1]
    made = {step: command._start_of(starts, step, 9) for step in (0, 3, 4, 6, 8)}
    ranks = {step: (one["world_size"], count) for step, (one, count) in made.items()}
    assert ranks == {0: (2, 4), 3: (2, 1), 4: (1, 5), 6: (1, 3), 8: (1, 1)}
