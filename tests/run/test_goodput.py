"""Every second of a run has a class: spans, kills at any byte, restarts, steps done twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacpp.run.goodput import CLASSES, FILE, Goodput, account, process_began, read_starts

EACH = ("checkpoint", "evaluation", "oom_retry")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at

    def passes(self, seconds: float) -> float:
        self.at += seconds
        return seconds


class Simulated:
    """Run of random spans over one clock, with its true seconds and the time it was killed."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng, self.clock = folder, rng, Clock()
        self.path = folder / FILE

    def start(self, first_step: int, steps: int, compiles: bool) -> dict[str, float]:
        """Simulate one start from `first_step` on; return its true seconds by class."""
        clock, rng = self.clock, self.rng
        truth = dict.fromkeys((*CLASSES, "startup"), 0.0)
        goodput = Goodput(self.folder, True, compiles, began=clock.at, now=clock, wall=clock)
        truth["startup"] += clock.passes(rng.uniform(0, 20))
        for step in range(first_step, first_step + steps):
            goodput.step(step)
            own = "compile" if compiles and step == first_step else "step"
            for _ in goodput.reading(self._batches(truth)):
                truth[own] += clock.passes(rng.uniform(0, 3))
            if rng.random() < 0.3:
                name = rng.choice(EACH)
                with goodput.span(name):
                    truth[name] += clock.passes(rng.uniform(0, 9))
        goodput.idle()
        truth["idle"] += clock.passes(rng.uniform(0, 5))
        goodput.close()
        return truth

    def _batches(self, truth: dict[str, float]):
        for number in range(self.rng.randint(1, 3)):
            truth["data"] += self.clock.passes(self.rng.uniform(0, 1))
            yield number


def goodput_at(folder: Path, clock: Clock) -> Goodput:
    return Goodput(folder, began=clock.at, now=clock, wall=clock)


def test_a_run_that_is_left_alone_is_told_exactly(tmp_path: Path) -> None:
    for seed in range(30):
        folder = tmp_path / str(seed)
        run = Simulated(folder, random.Random(seed))
        truth = run.start(0, 20, compiles=seed % 2 == 0)
        found = account(read_starts(run.path))
        assert found.wall_s == pytest.approx(run.clock.at - 1000.0, rel=1e-9)
        assert found.startup_s == pytest.approx(truth["startup"], abs=1e-6)
        for name in CLASSES:
            true = truth[name] + (truth["startup"] if name == "idle" else 0)
            assert found.seconds[name] == pytest.approx(true, abs=1e-6), name
        assert found.seconds["restart_lost"] == 0


def test_killed_at_any_byte_and_started_again_it_sums_to_the_wall(tmp_path: Path) -> None:
    """0.1 % is asked for; nothing but floating-point rounding is missing."""
    for seed in range(60):
        rng = random.Random(seed)
        run = Simulated(tmp_path / str(seed), rng)
        begin, first = run.clock.at, 0
        for _ in range(rng.randint(1, 4)):
            before = run.path.stat().st_size if run.path.exists() else 0
            run.start(first, 15, compiles=False)
            run.path.write_bytes(run.path.read_bytes()[: rng.randint(before, _end(run.path))])
            run.clock.passes(rng.uniform(0, 100))
            first = rng.randint(0, first + 15)
        run.start(first, 15, compiles=False)
        found = account(read_starts(run.path))
        starts = read_starts(run.path)  # a kill may have torn even the first line
        assert found.wall_s == pytest.approx(run.clock.at - starts[0].began, rel=1e-9)
        assert starts[0].began >= begin
        assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-9)
        assert all(seconds >= 0 for seconds in found.seconds.values())


def _end(path: Path) -> int:
    """Remove the line that says that the run ended on its own."""
    whole = path.read_bytes()
    return whole.rindex(b'{"end"')


def test_a_kill_loses_what_was_not_written_and_the_wait(tmp_path: Path) -> None:
    clock = Clock()
    one = goodput_at(tmp_path, clock)
    clock.passes(5)
    for step in range(4):
        one.step(step)
        clock.passes(10)
    # The fourth step was never written: the line of a step comes when the next one begins.
    clock.passes(30)
    two = goodput_at(tmp_path, clock)
    clock.passes(7)
    two.step(3)
    clock.passes(10)
    two.close()
    found = account(read_starts(tmp_path / FILE))
    assert found.seconds["step"] == 40 and found.seconds["restart_lost"] == 40
    assert found.seconds["idle"] == found.startup_s == 12
    assert found.redone_s == 0 and found.wall_s == 92 and found.starts == 2
    assert found.goodput == 40 / 92


def test_steps_done_again_are_lost_and_a_saved_one_is_not(tmp_path: Path) -> None:
    clock = Clock()
    for first, last in ((0, 6), (4, 5), (2, 8)):
        now = goodput_at(tmp_path, clock)
        for step in range(first, last):
            now.step(step)
            clock.passes(10)
            with now.span("checkpoint"):
                clock.passes(2)
        if last == 8:
            now.close()
    found = account(read_starts(tmp_path / FILE))
    # Of the first start steps 2 to 5 were done again, of the second all that it did.
    assert found.seconds["step"] == 80 and found.seconds["checkpoint"] == 16
    assert found.redone_s == found.seconds["restart_lost"] == 60
    assert found.wall_s == 156


def test_fast_steps_share_a_line_and_are_lost_in_part(tmp_path: Path) -> None:
    clock = Clock()
    one = goodput_at(tmp_path, clock)
    for step in range(100):
        one.step(step)
        clock.passes(0.0625)
    with one.span("checkpoint"):
        pass
    lines = (tmp_path / FILE).read_text().splitlines()
    assert len(lines) < 12
    two = goodput_at(tmp_path, clock)
    two.step(60)
    clock.passes(1)
    two.close()
    found = account(read_starts(tmp_path / FILE))
    assert found.redone_s == pytest.approx(40 * 0.0625, abs=1e-9)
    assert found.seconds["step"] == pytest.approx(60 * 0.0625 + 1, abs=1e-9)


def test_a_part_of_every_step_writes_no_line(tmp_path: Path) -> None:
    """A thousand waits for rows are a sum in the line that the steps share."""
    clock = Clock()
    goodput = goodput_at(tmp_path, clock)
    for step in range(1000):
        goodput.step(step)
        clock.passes(0.001)
        with goodput.part("data"):
            clock.passes(0.0005)
    goodput.close()
    lines = (tmp_path / FILE).read_text().splitlines()
    assert len(lines) <= 5
    assert account(read_starts(tmp_path / FILE)).seconds["data"] == pytest.approx(0.5)


def test_what_passes_after_an_end_is_nobodys_loss(tmp_path: Path) -> None:
    clock = Clock()
    for first in (0, 1):
        now = goodput_at(tmp_path, clock)
        now.step(first)
        clock.passes(10)
        now.close()
        clock.passes(1e5)
    found = account(read_starts(tmp_path / FILE))
    assert found.wall_s == found.seconds["step"] == 20


@pytest.mark.parametrize(
    "line",
    [
        b'{"from": 1, "to": 2',
        b"\x00\x00\x00",
        b"[1]",
        b'{"from": 1, "to": 2}',
        b'{"from": 1, "to": 2, "s": {"nonsense": 1}}',
        b'{"from": 1, "to": 2, "s": {"step": "1"}}',
        b'{"from": 1, "to": NaN, "s": {"step": 1}}',
        b'{"from": 1, "to": 2, "s": {"step": 1}, "steps": [1]}',
    ],
    ids=range(8),
)
def test_damaged_lines_are_left_out(tmp_path: Path, line: bytes) -> None:
    clock = Clock()
    now = goodput_at(tmp_path, clock)
    now.step(0)
    clock.passes(10)
    with now.span("checkpoint"):
        pass
    path = tmp_path / FILE
    whole = path.read_bytes()
    expected = account(read_starts(path))
    path.write_bytes(whole + line + b"\n")
    assert account(read_starts(path)) == expected
    path.write_bytes(whole + line)  # torn: the next start begins a line of its own
    goodput_at(tmp_path, clock).close()
    assert len(read_starts(path)) == 2


def test_attempts_that_ran_out_of_memory_come_off_the_start(tmp_path: Path) -> None:
    clock = Clock()
    clock.passes(90)
    now = Goodput(tmp_path, retried_s=50, began=1000.0, now=clock, wall=clock)
    clock.passes(5)
    now.step(0)
    clock.passes(5)
    now.close()
    found = account(read_starts(tmp_path / FILE))
    assert (found.seconds["oom_retry"], found.startup_s, found.wall_s) == (50, 45, 100)


def test_a_start_that_is_refused_writes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    now = goodput_at(tmp_path, clock)
    with pytest.raises(ValueError), now.span("checkpoint"):
        clock.passes(1)
        raise ValueError
    assert list(tmp_path.iterdir()) == []
    now = goodput_at(tmp_path, clock)
    clock.passes(1)
    with now.span("checkpoint"):
        clock.passes(2)
    with now.span("evaluation"):
        clock.passes(3)
    now.idle()  # nothing was left to train
    now.close()
    found = account(read_starts(tmp_path / FILE))
    assert (found.startup_s, found.seconds["checkpoint"], found.seconds["evaluation"]) == (1, 2, 3)


def test_ranks_that_are_not_the_first_write_nothing(tmp_path: Path) -> None:
    now = Goodput(tmp_path / "run", active=False)
    now.step(0)
    with now.span("checkpoint"):
        pass
    now.close()
    assert not (tmp_path / "run").exists()
    assert account(read_starts(tmp_path / "run" / FILE)).wall_s == 0


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import os, sys, time, pathlib\n"
        "from megacpp.run.goodput import Goodput\n"
        "g = Goodput(pathlib.Path(sys.argv[1]))\n"
        "g.step(0)\n"
        "with g.span('checkpoint'): pass\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert "start" in lines[0] and lines[-1]["s"].keys() == {"checkpoint"}
    assert lines[0]["start"] < lines[1]["to"]


def test_a_process_began_when_its_parent_started_it() -> None:
    """A second before it asks, as the parent's clock says; the kernel counts hundredths."""
    code = (
        "import time; from megacpp.run.goodput import process_began\n"
        "time.sleep(1)\n"
        "print(process_began())"
    )
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before - 0.1 <= float(done.stdout) <= time.time() - 1 + 0.1
    assert float(done.stdout) < before + 1, "not when it was asked"
    assert process_began() < before
