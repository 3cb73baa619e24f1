"""A hang ends soon and names the rank that did not arrive; tests/torture has its long form."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacpp.config.arguments import parse_run
from megacpp.config.checks.every import hang_limits
from megacpp.errors import ConfigError
from megacpp.outcome import PEER_LOST
from megacpp.run import flight
from megacpp.run.blame import blame
from megacpp.run.hang import HangWatch, group_timeout
from megacpp.run.rank_store import this_process
from megacpp.run.straggler import FILE, WINDOW, Straggler
from parallel.boundary import AccumulationBoundary
from tests.launch import background, forked
from tests.ranks import LONG_S
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


def test_the_line_of_a_rank_is_below_the_project() -> None:
    line, whole = flight.stack()
    assert re.fullmatch(r"megacpp/run/flight\.py:\d+ stack", line)
    assert "test_the_line_of_a_rank" in whole


def test_who_does_not_report_leaves_after_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher ends all ranks once one has left: the report must be written by then."""

    class Left(BaseException):
        """Stands for the end of the process."""

    def leave(code: int) -> None:
        raise Left(code, store.check(["hang/reported"]))

    store: Any = dist.HashStore()
    here = this_process()
    peers: Any = SimpleNamespace(
        rank=1, size=2, table=[here, here], store=store, clock=None, waits="barrier", meetings=3
    )
    watch = HangWatch(peers, {"startup": 0.0}, tmp_path, lambda line: None)
    watch._stop.set()
    watch._thread.join()
    store.set("hang/state/0", json.dumps(state("a.py:1 f", 7)))
    monkeypatch.setattr(os, "_exit", leave)
    threading.Timer(1.0, lambda: store.set("hang/reported", "")).start()
    with pytest.raises(Left) as end:
        watch._answer()
    assert end.value.args == (PEER_LOST, True)
    told = json.loads(store.get("hang/state/1"))
    assert "phase" in (tmp_path / "failures/hang-rank-1.txt").read_text()
    waits = {"op": "barrier", "seq": 3, "key": "store", "group": "all ranks", "members": [0, 1]}
    assert told["waits"][-1] == waits and told["reached"]["store"] == 3


def test_a_rank_that_saves_is_not_ended_by_another_one_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time counts from the end of its save, which may take longer than on other ranks."""

    class Left(BaseException):
        """Stands for the end of the process."""

    def leave(code: int) -> None:
        raise Left(code)

    store: Any = dist.HashStore()
    save = SimpleNamespace(busy=True)
    peers: Any = SimpleNamespace(rank=0, size=2, store=store, clock=None, writer=save, meetings=0)
    watch = HangWatch(peers, hang_limits("0"), tmp_path, lambda line: None)
    watch._stop.set()
    watch._thread.join()
    monkeypatch.setattr(os, "_exit", leave)
    store.add("said", 1)
    watch._follow(0.0)
    watch._follow(100.0)
    save.busy = False
    watch._follow(101.0)
    with pytest.raises(Left) as end:
        watch._follow(112.0)
    assert end.value.args == (PEER_LOST,)


def test_the_recorder_is_read_in_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables of groups have no lock, and the first step of a rank writes to them."""
    looks: Counter[str] = Counter()

    def look(name: str, result: Any) -> Any:
        looks[name] += 1
        return result

    monkeypatch.setattr(flight, "under_way", lambda: look("whole", (7, False)))
    monkeypatch.setattr(flight, "reached", lambda: look("numbers", {"world": 7}))
    clock, here = SimpleNamespace(phase="step", first=True, at=0, turns=1), this_process()
    peers: Any = SimpleNamespace(
        rank=1,
        size=2,
        table=[here, here],
        store=dist.HashStore(),
        clock=clock,
        waits="",
        meetings=0,
    )
    watch = HangWatch(peers, hang_limits("0"), tmp_path, lambda line: None)
    while looks["numbers"] < 2:
        time.sleep(0.01)
    assert not looks["whole"] and watch._late_s > 0  # the number of collectives is a sign
    clock.first = False
    while looks["whole"] < 2:
        time.sleep(0.01)
    watch._stop.set()
    watch._thread.join()


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
    told = {path.name: path.read_text() for path in (folder / "failures").glob("hang-rank-*.txt")}
    assert told.keys() == {f"hang-rank-{rank}.txt" for rank in range(1 if stopped else 2)}
    for text in told.values():  # a stopped rank writes nothing
        assert text.startswith("step 2 (from 0), phase step\n")
    waiting = told["hang-rank-0.txt"]
    assert re.search(r"\n  File .*, in accumulate\n", waiting)
    (wait,) = [line for line in waiting.splitlines() if line.startswith("waits in ")]
    at = json.loads(wait.removeprefix("waits in "))
    begun = re.findall(r"(?m)^collectives begun: (.*)$", "".join(told.values()))
    assert at["op"] == "all_reduce" and at["members"] == [0, 1] and at["group"]
    assert json.loads(begun[0])[at["key"]] == at["seq"] > 0
    if not stopped:
        late_one = told["hang-rank-1.txt"]
        assert "waits in " not in late_one and re.search(r"\n  File .*, in late\n", late_one)
        assert json.loads(begun[1])[at["key"]] < at["seq"]


def test_a_rank_that_does_not_notice_an_error_leaves(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleep stands for a kernel of NCCL, which no error of a peer ends."""
    accumulate = AccumulationBoundary.accumulate

    def broken(self: AccumulationBoundary, batches: Any, step: int = 0) -> Any:
        if step == 2 and os.environ["RANK"] == "1":
            raise ValueError("a bug")
        time.sleep(600 * (step == 2))
        return accumulate(self, batches, step)

    monkeypatch.setattr(AccumulationBoundary, "accumulate", broken)
    monkeypatch.setattr("megacpp.run.hang.LEAVE_S", 2.0)
    flags = [*SMALL, *ADAMW, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    flags += ["--model.depth", "1", "--model.pattern", "F", "--train.device-batch-size", "1"]
    done = forked("tiny", *flags, "--run.timeout", "600", ranks=2)
    assert done.returncode == 6  # of the first rank; the second one's is 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: rank 1: ValueError: a bug (")
    assert json.loads((tmp_path / "run/status.json").read_text())["code"] == 1


@pytest.mark.slow
def test_output_that_nobody_reads_is_a_hang_with_a_name(corpus: Path, tmp_path: Path) -> None:
    """A pipe behind rank 0 under torchrun, read up to the first step, and then full."""
    folder, reader, writer = tmp_path / "run", *os.pipe()
    flags = ["tiny", *SMALL, *ADAMW, "--data.path", str(corpus), "--run.dir", str(folder)]
    flags += ["--run.steps", "100000", "--train.device-batch-size", "1"]
    with background(*flags, "--run.timeout", "step=6", ranks=2, out=writer) as process:
        said = b""
        while not re.search(rb"step +1/100000", said):
            more = os.read(reader, 4096)
            said += more
            assert process.poll() is None, process.communicate()
        filler = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while os.write(filler, b"x"):
                pass
        _, err = process.communicate(timeout=LONG_S)
    for handle in (reader, writer, filler):
        os.close(handle)
    status = json.loads((folder / "status.json").read_text())
    assert status["code"] == 6, err
    assert "run.timeout: no progress for 6 s in step " in status["message"]
    assert re.search(r": rank 0 did not arrive, in step \d+, phase \w+, ", status["message"])
    stack = (folder / "failures/hang-rank-0.txt").read_text()
    assert "waits in " not in stack and re.search(r"\n    .*(print|write|flush)\(", stack), stack


@pytest.mark.slow
def test_a_straggler_in_real_processes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 takes at least three times as long for 25 steps; the run goes on to its end."""
    accumulate = AccumulationBoundary.accumulate

    def slow(self: AccumulationBoundary, batches: Any, step: int = 0) -> Any:
        began = time.monotonic()
        found = accumulate(self, batches, step)
        if os.environ["RANK"] == "1":
            time.sleep(max(0.3, 2.5 * (time.monotonic() - began)))
        return found

    monkeypatch.setattr(AccumulationBoundary, "accumulate", slow)
    flags = [*SMALL, *ADAMW, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    flags += ["--model.depth", "1", "--model.pattern", "F", "--train.device-batch-size", "1"]
    done = forked("tiny", *flags, "--run.steps", str(WINDOW + 12), ranks=2)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "is a straggler" in line]
    assert said and all("warning: rank 1 is a straggler: " in line for line in said), said
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert {line["rank"] for line in lines} == {1}
    assert json.loads((tmp_path / "run/status.json").read_text())["code"] == 0
