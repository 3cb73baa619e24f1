"""Runs in processes of their own: those that only wait for each other are ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megacpp.lessons import ranks
from parallel.boundary import AccumulationBoundary
from tests.launch import finished, forked, in_a_session, until, watched
from tests.test_run import ADAMW, SMALL


def test_ranks_of_a_run_that_wait_for_each_other_are_ended(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/test_ranks.py` holds the seconds; fewer of them here."""
    original = AccumulationBoundary.finish_step

    def finish_step(self: AccumulationBoundary, *status) -> None:
        original(self, *status)
        if self.world.rank:
            dist.barrier()

    monkeypatch.setattr(ranks, "STILL_S", 4.0)
    paths = ["--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    began = time.monotonic()
    with (
        mock.patch.object(AccumulationBoundary, "finish_step", finish_step),
        pytest.raises(subprocess.TimeoutExpired),
    ):
        forked("tiny", *SMALL, *ADAMW, *paths, "--train.device-batch-size", "2", ranks=2)
    assert time.monotonic() - began < 100


def test_a_started_program_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its children; what it printed until then is in the error."""
    waits = "import subprocess, sys; print('here', flush=True); subprocess.run(['sleep', '600'])"
    monkeypatch.setattr(ranks, "STILL_S", 2.0)
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        watched([sys.executable, "-c", waits])
    assert caught.value.output == "here\n"


def test_a_started_program_that_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    burns = "import time; until = time.monotonic() + 4\nwhile time.monotonic() < until: pass"
    monkeypatch.setattr(ranks, "STILL_S", 1.5)
    assert watched([sys.executable, "-c", burns]).returncode == 0


@pytest.mark.parametrize(("words", "why"), [("time.sleep(99)", "hangs"), ("0", "has ended")])
def test_waiting_for_a_run_ends_with_it(
    words: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail soon, with the output, where a run hangs or is over before the event."""
    monkeypatch.setattr(ranks, "STILL_S", 1.5)
    with (
        in_a_session("-c", f"import time; print('said', flush=True); {words}") as process,
        pytest.raises(AssertionError, match=f"{why}.*said"),
    ):
        until(lambda: False, process)


def test_processes_that_all_wait_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their descendants; the error has the output of those that ended and those that wait."""
    monkeypatch.setattr(ranks, "STILL_S", 1.5)
    waits = "import subprocess; print('here', flush=True); subprocess.run(['sleep', '600'])"
    began = time.monotonic()
    with (
        in_a_session("-c", "print('one')") as one,
        in_a_session("-c", waits) as other,
        pytest.raises(subprocess.TimeoutExpired) as caught,
    ):
        finished(one, other)
    assert caught.value.output == "one\nhere\n" and other.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 60


def test_a_process_that_waits_for_another_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as any of them computes; each output is returned, however long it is."""
    monkeypatch.setattr(ranks, "STILL_S", 1.5)
    burns = "import time; until = time.monotonic() + 4\nwhile time.monotonic() < until: pass"
    with (
        in_a_session("-c", f"{burns}\nprint('x' * 200_000)") as first,
        in_a_session("-c", "import time; time.sleep(3); print('y' * 200_000)") as second,
    ):
        assert finished(second, first) == [("y" * 200_000 + "\n", ""), ("x" * 200_000 + "\n", "")]
