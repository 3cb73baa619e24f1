"""A hang ends soon and names the rank that did not arrive; tests/torture has its long form."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import hang_limits
from megacpp.errors import ConfigError
from megacpp.run.blame import blame
from megacpp.run.hang import group_timeout
from megacpp.run.straggler import FILE, WINDOW, Straggler
from parallel.boundary import AccumulationBoundary
from tests.launch import forked
from tests.test_run import ADAMW, SMALL


def state(line: str, reached: int, *waits: tuple[str, int], phase: str = "step") -> dict[str, Any]:
    """State of one of three ranks that are a single group."""
    group = {"key": "0 [0, 1, 2]", "group": "world", "members": [0, 1, 2]}
    told = [{"op": op, "seq": seq, **group} for op, seq in waits]
    here = {"step": 4, "phase": phase, "line": line, "stack": ""}
    return here | {"waits": told, "reached": {group["key"]: reached}}


def test_the_rank_behind_is_blamed() -> None:
    waiting, reading = ("all_reduce", 7), state("data.py:3 take", 6, phase="data")
    states = {0: state("a.py:1 f", 7, waiting), 1: reading, 2: state("a.py:1 f", 7, waiting)}
    said = blame(states, range(3), {})
    assert said.startswith("rank 1 did not arrive, in step 5, phase data, data.py:3 take; ")
    assert "rank 0 waits in all_reduce 7 of world, in step 5, phase step, a.py:1 f" in said


def test_a_silent_rank_is_blamed_and_one_that_left_is_not() -> None:
    states = {0: state("a.py:1 f", 7, ("all_reduce", 7))}
    said = blame(states, [0, 2], {2: {"step": 4, "phase": "step"}})
    assert said.startswith("rank 2 gave no answer (stopped, or stuck outside Python, last seen in")
    assert "rank 0 waits in all_reduce 7" in said and "rank 1" not in said


def test_waits_are_followed_to_the_rank_that_waits_for_nobody() -> None:
    of_pair = {"key": "1 [0, 1]", "group": "tp", "members": [0, 1]}
    first = state("a.py:1 f", 3) | {"waits": [{"op": "all_gather", "seq": 9, **of_pair}]}
    states = {0: first, 1: state("b.py:2 g", 4, ("all_reduce", 4)), 2: state("c.py:3 h", 3)}
    states[0]["reached"] |= {"1 [0, 1]": 9}
    states[1]["reached"] |= {"1 [0, 1]": 8}
    said = blame(states, range(3), {})
    assert said.startswith("rank 2 did not arrive, in step 5, phase step, c.py:3 h; rank 1 waits")


def test_ranks_that_wait_for_each_other_and_different_collectives() -> None:
    of_pair = {"key": "1 [0, 1]", "group": "tp", "members": [0, 1]}
    one = state("a.py:1 f", 4, ("all_reduce", 4)) | {"reached": {"0 [0, 1, 2]": 4, "1 [0, 1]": 8}}
    two = state("b.py:1 f", 3) | {"waits": [{"op": "all_gather", "seq": 9, **of_pair}]}
    two["reached"] |= {"1 [0, 1]": 9}
    assert blame({0: one, 1: two}, range(2), {}).startswith("ranks 0, 1 wait for each other: ")
    other = state("b.py:1 f", 4, ("broadcast", 4))
    said = blame({0: one, 1: other}, range(2), {})
    assert said.startswith("ranks 0 and 1 differ in a collective: rank 0 waits in all_reduce 4")
    alone = blame({0: state("a.py:1 f", 0)}, [0], {})
    assert alone == "rank 0 made no progress: rank 0 is in step 5, phase step, a.py:1 f"
    stages = state("p.py:1 f", 4, ("send or receive", -1))
    said = blame({0: stages, 1: state("b.py:1 f", 4)}, range(2), {})
    assert said.startswith("rank 1 did not arrive") and "rank 0 waits in send or receive of" in said


def test_limits_are_one_number_or_by_phase() -> None:
    usual = hang_limits("start=1800,step=600,save=1800,evaluation=1800")
    assert hang_limits("60") == dict.fromkeys(usual, 60.0)
    assert hang_limits("step=5, save=7.5") == usual | {"step": 5.0, "save": 7.5}
    for wrong in ("", "soon", "step=", "walk=5", "-1", "nan", "1e99", "step=1,2x"):
        with pytest.raises(ConfigError, match=r"run\.timeout=.*must be seconds"):
            parse_run(["--run.timeout", wrong], 1)


def test_a_straggler_is_reported_once_and_again_after_it_recovered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straggler = Straggler(tmp_path)
    for step in range(WINDOW + 1):
        assert not straggler.figures() and not straggler.due()
        straggler.sample(step, 0.3, waiting=False)
        straggler.sample(step, 0.7, waiting=True)
    own = straggler.figures()
    assert own == pytest.approx({"own_s": 0.3, "step_s": 1.0})
    assert straggler.due() and not straggler.due()
    told = {rank: {"step": 30, **own} for rank in range(4)}
    straggler.compare(told)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        for mine in (0.9, 0.9, 0.3):
            straggler.compare({**told, 2: {"step": 30, "own_s": mine, "step_s": 1.0}})
        assert capsys.readouterr().out.count("rank 2 is a straggler") == 1
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["rank"] for line in lines] == [2, 2]


@pytest.mark.parametrize("stopped", [False, True], ids=["late", "stopped"])
def test_a_hang_in_real_processes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    accumulate = AccumulationBoundary.accumulate

    def late(self: AccumulationBoundary, batches: Any, step: int = 0) -> Any:
        if (step, os.environ["RANK"]) == (2, "1"):
            (tmp_path / "began").write_text(str(time.time()))
            ranks = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
            assert ranks.options._timeout == group_timeout("step=2,save=2")
            os.kill(os.getpid(), signal.SIGSTOP) if stopped else time.sleep(600)
        return accumulate(self, batches, step)

    monkeypatch.setattr(AccumulationBoundary, "accumulate", late)
    folder = tmp_path / "run"
    flags = [*SMALL, *ADAMW, "--data.path", str(corpus), "--run.dir", str(folder)]
    flags += ["--model.depth", "1", "--model.pattern", "F", "--train.device-batch-size", "1"]
    done = forked("tiny", *flags, "--run.timeout", "step=2,save=2", ranks=2)
    assert done.returncode == 6, done.stderr
    assert time.time() - float((tmp_path / "began").read_text()) < 2 + 10
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "run.timeout: no progress for 2 s in step 3, phase step: rank 1 " in line
    assert ("gave no answer (stopped" if stopped else "did not arrive, in step 3") in line
    assert "rank 0 waits in all_reduce " in line
    status = json.loads((folder / "status.json").read_text())
    assert status["code"] == 6 and status["message"] in line
    stack = (folder / "failures/hang-rank-0.txt").read_text()
    assert "phase step" in stack and "all_reduce" in stack and "in accumulate" in stack
