"""Preemption by SIGTERM: the run saves after the current step, exits, and resumes bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megacpp.outcome import UNSAVED
from megacpp.run.preemption import StopRequest
from megacpp.run.records import Records
from megacpp.state.published import latest_checkpoint
from tests.figures import Record
from tests.launch import ROOT, finished, forked, in_a_session, until
from tests.ranks import children
from tests.test_run import ADAMW, SMALL, records

STEPS = 200  # of the run that is stopped: more than it gets to
FLAGS = ["tiny", *SMALL, *ADAMW, "--run.eval-rows", "8", "--memory.calibration="]
FLAGS += ["--optim.schedule", "constant", "--optim.warmup-steps", "1"]  # of any length the same


def test_told_twice_is_told_once() -> None:
    """Signal every process, as schedulers do; torchrun then signals its ranks once more."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop = StopRequest()
        assert not stop()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_terminal_that_is_gone_is_written_to_no_more(tmp_path: Path) -> None:
    """SIGHUP comes when a terminal closes; what is printed then goes nowhere, without an error."""
    main, terminal = os.openpty()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(terminal, 1)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            stop = StopRequest()
            os.kill(os.getpid(), signal.SIGHUP)
            print("nobody reads this", flush=True)
            code = 0 if stop() and stop.heard == "SIGHUP" else 2
        finally:
            os._exit(code)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with suppress(OSError):  # the end of a terminal that nobody has open
        assert os.read(main, 100) == b""
    os.close(main)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "told"), [(1, 0), (2, 0), (2, -1)], ids=["one", "agent", "rank"])
def test_a_run_that_is_told_to_stop_saves(
    corpus: Path, tmp_path: Path, ranks: int, told: int, record_property: Record
) -> None:
    """Signal the process; torchrun, which signals its two ranks; or only the second rank."""
    folder = tmp_path / "run"
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    batch = ["--train.device-batch-size", str(2 // ranks)]
    flags = [*FLAGS, *paths, *batch, "--run.steps", str(STEPS)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [sys.executable, *(torchrun if ranks > 1 else []), "train.py", *flags],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until(lambda: (folder / "metrics.jsonl").exists() and len(records(folder)) >= 2, process)
        told_at = time.monotonic()
        os.kill([process.pid, *children(process.pid)][told], signal.SIGTERM)
        ((_, err),) = finished(process)
        took_s = time.monotonic() - told_at
    finally:
        process.kill()
    assert process.returncode == (75 if ranks == 1 else 1), err  # torchrun's own is 1
    done = len(records(folder))
    saved = latest_checkpoint(folder / "checkpoints")
    assert 2 <= done < STEPS and saved is not None and saved.name == f"step-{done:06}"
    assert f"stopped by SIGTERM after step {done}: the same command goes on from {saved}" in err
    assert told == 0 or err.count("exitcode  : 75") >= 1

    more = ["--run.steps", str(done + 2), "--checkpoint.keep", "0"]
    again = forked(*FLAGS, *paths, *batch, *more, ranks=ranks)
    assert again.returncode == 0, again.stderr
    whole = tmp_path / "whole"
    flags = [*FLAGS, "--data.path", str(corpus), "--run.dir", str(whole), *batch, *more]
    assert forked(*flags, ranks=ranks).returncode == 0
    for one, two in zip(records(folder), records(whole), strict=True):
        assert all(one[key] == two[key] for key in ("step", "loss", "grad_norm", "lr"))
    record_property("runs ended by SIGTERM saved their last step and went on bit for bit", 1)
    record_property("slowest end, seconds", took_s)


def test_an_interrupt_while_torch_is_imported_ends_without_a_word(tmp_path: Path) -> None:
    """Libraries print a traceback, or swallow the interrupt and go on."""
    words = [sys.executable, str(ROOT / "train.py"), "tiny", "--run.dir", str(tmp_path / "run")]
    done = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        maps = Path(f"/proc/{done.pid}/maps")
        until(lambda: "libtorch" in maps.read_text(), done)
        done.send_signal(signal.SIGINT)
        said = done.communicate(timeout=60)[0]
    finally:
        done.kill()
    assert said == "" and done.returncode == -signal.SIGINT
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_told_while_torch_is_imported(corpus: Path, tmp_path: Path, ranks: int) -> None:
    """Signal the processes as a scheduler does, the launcher and its ranks at once."""
    words = [*FLAGS, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    words += ["--train.device-batch-size", "1"]
    with in_a_session("-m", "megacpp", "train", *words, "--nproc", str(ranks)) as process:
        until(lambda: imports_torch(process.pid, ranks), process)
        tell(process.pid, *children(process.pid))
        ((_, err),) = finished(process)
    assert process.returncode == 75 and err.strip().splitlines() == [UNSAVED]
    assert not (tmp_path / "run").exists()


def tell(*pids: int, number: int = signal.SIGTERM) -> None:
    """Send a signal to each process that hasn't ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def imports_torch(launcher: int, ranks: int) -> bool:
    """Return whether all ranks load torch's library at this moment."""
    pids = children(launcher) if ranks > 1 else [launcher]
    with suppress(FileNotFoundError):
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        return len(maps) >= ranks and all("libtorch" in text for text in maps)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_while_blocks_are_traced(corpus: Path, tmp_path: Path, number: int) -> None:
    """Signal every process, the one that traces blocks too: it doesn't fail or say anything."""
    words = [*FLAGS, "--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    words += ["--run.steps", "500", "--train.device-batch-size", "1", "--nproc", "2"]
    empty = {"MEGACPP_CACHE": str(tmp_path)}  # no block was traced before
    with in_a_session("-m", "megacpp", "train", *words, env=empty) as process:
        found: list[int] = []

        def tracing() -> bool:
            found[:] = [pid for rank in children(process.pid) for pid in children(rank)]
            return bool(found)

        until(tracing, process)
        tell(process.pid, *children(process.pid), *found, number=number)
        ((_, err),) = finished(process)
    code, line = 75, "stopped by SIGTERM after step 1: the same command goes on from"
    if number == signal.SIGINT:
        code, line = 130, "stopped: nothing was saved yet"
    assert process.returncode == code and line in err and "Traceback" not in err, err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_that_a_stop_came_before_is_made_by_the_next_start(
    corpus: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*FLAGS, "--data.path", str(corpus), "--run.steps", "4", "--run.eval-every", "2"]
    folders = tmp_path / "whole", tmp_path / "stopped"
    whole, stopped = ([*flags, "--run.dir", str(folder)] for folder in folders)
    assert forked(*whole, ranks=ranks).returncode == 0
    with monkeypatch.context() as patch:
        begin = Records.begin

        def told(records: Records, step: int) -> None:
            records.stop.heard = "SIGTERM" if step == 1 else ""
            begin(records, step)

        patch.setattr(Records, "begin", told)
        assert forked(*stopped, ranks=ranks).returncode == 75
    assert len(records(folders[1])) == 2 and not (folders[1] / "evaluations.jsonl").exists()
    assert forked(*stopped, ranks=ranks).returncode == 0
    one, two = ((folder / "evaluations.jsonl").read_text() for folder in folders)
    assert one == two and one.count("\n") == 2
