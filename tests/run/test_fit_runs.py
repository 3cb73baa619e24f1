"""Fitted runs on real ranks: a candidate that runs out of memory, and one that is broken."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist

from megacpp.launch import trial
from megacpp.launch.fit import BUMP
from megacpp.lessons.launch import Done, _script, forked
from megacpp.state.published import latest_checkpoint
from parallel.boundary import AccumulationBoundary
from tests.test_run import SMALL, records

GLOO, START = dist.ProcessGroupGloo.__init__, dist.init_process_group


class Forked:
    """Rank of a candidate, forked where `train.py` starts an interpreter."""

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0


def breaking(first: Callable[[], object]) -> Callable[..., Forked]:
    """Return what starts children; in the first attempt rank 1 runs `first` within a step."""

    def child(arguments: Sequence[str], port: str, folder: Path) -> None:
        dist.ProcessGroupGloo.__init__ = GLOO  # type: ignore[method-assign]
        dist.init_process_group = START
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        if "attempt-1" in str(folder) and rank == 1:
            AccumulationBoundary.accumulate = lambda *_: first()  # type: ignore[assignment]
        meeting = folder / port
        meeting.mkdir(exist_ok=True)
        _script(tuple(arguments), rank, size, meeting)

    def spawn(arguments: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> Forked:
        return Forked(child, arguments, environment["MASTER_PORT"], Path(log.name).parent)

    return spawn


def fitted(
    corpus: Path, folder: Path, patch: pytest.MonkeyPatch, first: Callable[[], object]
) -> Done:
    """Two ranks with `--fit auto`."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    patch.setattr(trial, "spawn", breaking(first))
    two = "--model.depth 2 --model.pattern AE --train.tokens-per-step 384 --run.eval-rows 2".split()
    few = ["--run.steps", "2", "--run.sample-tokens", "0", "--memory.device-gib", "1"]
    few += ["--memory.fit-candidates", "1"]
    paths = ["--data.path", str(corpus), "--run.dir", str(folder / "run")]
    kept = [f"--memory.calibration={folder / 'calibration'}", "--fit", "auto"]
    return forked("tiny", *SMALL, *two, *few, *paths, *kept, ranks=2)


@pytest.mark.slow
def test_a_run_that_finds_what_fits(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the first candidate ask the allocator for more than any machine has."""
    done = fitted(corpus, tmp_path, monkeypatch, lambda: torch.empty(1 << 60, dtype=torch.uint8))
    assert done.returncode == 0, done.stdout + done.stderr
    launch = json.loads((tmp_path / "run/launch.json").read_text())
    first, second = launch["attempts"]
    assert first["outcome"] == "oom" and "rank 1: RuntimeError: " in first["detail"]
    assert second["outcome"] == "ok" and second["median_step_s"] > 0
    assert len(second["grad_norms"]) == 4 and second["predicted_bytes"] < first["predicted_bytes"]
    assert second["headroom"] > first["headroom"]
    tried = launch["plan"]["first"]
    assert first["predicted_bytes"] == tried[0]["predicted_bytes"]
    same = [c for c in tried if c["checkpointing"] == first["checkpointing"]]
    below = [c for c in same if c["predicted_bytes"] <= first["predicted_bytes"] * (1 - BUMP)]
    assert second["checkpointing"] == first["checkpointing"] or not below

    config, asked = launch["config"], first["changed"] | second["changed"]
    for key, value in asked.items():
        section, name = key.split(".")
        assert config[section][name] == value, key
    assert config["train"]["tokens_per_step"] == 384 and config["run"]["steps"] == 2
    assert "chosen by attempt 2 of memory.fit=auto" in done.stdout
    sources = json.loads((tmp_path / "run/config.json").read_text())["provenance"]
    assert all(sources[key] == "fitted" for key in second["changed"])
    assert len(records(tmp_path / "run")) == 2
    assert latest_checkpoint(tmp_path / "run/checkpoints") is not None
    (kept,) = (tmp_path / "run.fit").iterdir()
    assert [path.name for path in kept.iterdir()] == ["attempt-1"], "what failed can be read"
    assert {path.name for path in (kept / "attempt-1").iterdir()} >= {"failures", "launch.json"}
    assert not (kept / "attempt-1/checkpoints").exists()
    known = launch["memory"]["calibration"]
    assert known["source"] == "record", "the four steps were measured"


@pytest.mark.slow
def test_a_run_whose_candidate_is_broken(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fitted(corpus, tmp_path, monkeypatch, lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert done.returncode == 1, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1 and ours[0].startswith("error: memory.fit=auto: attempt 1 "), done.stderr
    assert "not for lack of memory: rank 1: RuntimeError: " in ours[0], done.stderr
    assert "mat1 and mat2 shapes" in ours[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_smoke_keeps_nothing(corpus: Path, tmp_path: Path) -> None:
    flags = ["--run.steps", "2", "--train.device-batch-size", "1", "--fit", "smoke"]
    paths = ["--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    done = forked("tiny", *SMALL, *flags, *paths)
    assert done.returncode == 0, done.stderr
    assert len(records(tmp_path / "run")) == 2 and "---- sample" not in done.stdout
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left >= {"config.json", "launch.json", "metrics.jsonl"}
    assert not left & {"checkpoints", "final", "samples", "evaluations.jsonl"}, left
