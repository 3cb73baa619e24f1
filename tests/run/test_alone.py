"""A run folder has one start at a time, which dies with its launcher; real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megacpp.errors import ConfigError
from megacpp.outcome import started_ticks
from megacpp.run import lock as locks
from megacpp.run import preemption
from megacpp.run.lock import FILE, take
from megacpp.state.published import latest_checkpoint
from tests.launch import ROOT, background, forked, in_a_session, until
from tests.run.test_preemption import FLAGS, children
from tests.test_run import records

HERE = {"PYTHONPATH": str(ROOT)}  # children of a command import this checkout, too
HOLD = (
    "import sys, time; from pathlib import Path; from megacpp.run.lock import take;"
    "lock = take(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
)


@contextmanager
def holder(folder: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder's lock."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", HOLD, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LEASE_S", 3.0)


def lease(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


def rewritten(folder: Path, **changes: Any) -> None:
    (folder / FILE).write_text(json.dumps(lease(folder) | changes))


def test_the_holder_is_named_and_a_dead_one_is_followed(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        with pytest.raises(ConfigError) as error:
            take(tmp_path)
        said, host = str(error.value), os.uname().nodename
        assert f"run.dir={tmp_path}: is in use by process {other.pid} on {host} since 20" in said
        with pytest.raises(ConfigError):  # it beats: nobody may take it over
            take(tmp_path, force=True)
        other.kill()
        other.wait()
        lock = take(tmp_path)
    assert lock.followed and lease(tmp_path)["pid"] == os.getpid()
    lock.release()
    assert lease(tmp_path)["ended"] is True
    again = take(tmp_path)
    assert not again.followed
    again.release()


@pytest.mark.usefixtures("quick")
def test_a_stopped_holder_is_taken_over_by_force_and_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        os.kill(other.pid, signal.SIGSTOP)
        with pytest.raises(ConfigError):
            take(tmp_path)
        lock = take(tmp_path, force=True)
        os.kill(other.pid, signal.SIGCONT)
        assert other.wait(20) == 2
        assert other.stderr is not None and "taken over by process" in other.stderr.read()
    assert lock.owned()
    lock.release()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this-node", "another-node"])
def test_without_locks_the_lease_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """A file system that grants every lock: by the process here, by its beats elsewhere."""
    monkeypatch.setattr(locks, "_flock", lambda handle: True)
    with holder(tmp_path) as other:
        if elsewhere:
            monkeypatch.setattr(locks, "this_node", lambda: ("another", "another"))
        with pytest.raises(ConfigError, match=f"is in use by process {other.pid}"):
            take(tmp_path)
        other.kill()
        other.wait()
        take(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 5000, b'{"pid": "x"}', b"\xff\0"])
def test_a_lock_of_anything_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    take(tmp_path).release()


def test_a_pid_that_is_another_process_now(tmp_path: Path) -> None:
    take(tmp_path).release()
    rewritten(tmp_path, ended=False, pid=os.getppid(), ticks=1)
    take(tmp_path).release()
    assert started_ticks(os.getpid()) is not None and started_ticks(2**22 + 1) is None


def test_a_pid_of_another_node_is_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(tmp_path).release()
    rewritten(tmp_path, ended=False, node="another")
    monkeypatch.setattr(locks, "_beats", lambda path, holder: True)
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}"):
        take(tmp_path)


def test_a_lock_that_is_deleted_before_it_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused start deletes its file between another one's open and its lock."""
    first, granted = take(tmp_path), locks._flock

    def late(handle: int) -> bool:
        first.release(refused=True)
        return granted(handle)

    monkeypatch.setattr(locks, "_flock", late)
    second = take(tmp_path)
    assert second.owned() and not second.followed
    second.release()


def ended(pids: list[int], within_s: float) -> bool:
    """Return whether processes have ended after at most so many seconds."""
    deadline = time.monotonic() + within_s
    while any(started_ticks(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_rank_that_the_kernel_does_not_end_looks_for_its_launcher_each_step() -> None:
    """A rank without prctl ends by the check that it makes in each step."""
    code = (
        "import os, time; from megacpp.run.preemption import StopRequest;"
        "os.environ['TORCHELASTIC_RUN_ID'] = 'x'; rank = os.fork();"
        "stop = None if rank else StopRequest();"
        "print(os.getpid(), flush=True);"
        "[time.sleep(0.05) for _ in iter(lambda: True if rank else not stop(), False)]"
    )
    with in_a_session("-c", code, env=HERE) as launcher:
        assert launcher.stdout is not None
        (rank,) = {int(launcher.stdout.readline()) for _ in range(2)} - {launcher.pid}
        assert not ended([rank], 0.5), "its launcher lives"
        launcher.kill()
        assert ended([rank], 30)


def test_ctrl_c_twice_ends_ranks_that_wait_for_ever(tmp_path: Path) -> None:
    """Under torchrun, whose own patience is 30 s: two ranks that wait in C, where no handler runs.

    torchrun passes the first one on, and a SIGTERM at the second: its ranks have sessions of their
    own, which a terminal's Ctrl-C doesn't reach.
    """
    script = tmp_path / "waits.py"
    script.write_text(
        "import ctypes, os, pathlib; from megacpp.run.preemption import StopRequest\n"
        "stop, libc = StopRequest(), ctypes.CDLL(None)\n"
        "mutex = ctypes.create_string_buffer(64)\n"
        "libc.pthread_mutex_lock(mutex)\n"
        "pathlib.Path(__file__).with_name(f'rank-{os.getpid()}').touch()\n"
        "libc.pthread_mutex_lock(mutex)\n"
    )
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    with in_a_session(*agent, env=HERE) as process:
        until(lambda: len([*tmp_path.glob("rank-*")]) == 2, process)
        ranks = [int(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")]
        try:
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.2)
            assert ended(ranks, 15), "2 s and a loaded machine"
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_grace_after_a_second_ctrl_c_is_below_two_seconds(
    monkeypatch: pytest.MonkeyPatch, second: signal.Signals
) -> None:
    """Without a clock: what it sleeps, and then leaves with."""
    heard = iter([bytes([signal.SIGTERM, signal.SIGINT]), bytes([second])])
    done: list[float] = []
    monkeypatch.setattr(preemption.os, "read", lambda *_: next(heard))
    monkeypatch.setattr(preemption.time, "sleep", done.append)
    monkeypatch.setattr(preemption.os, "_exit", done.append)
    preemption._leave_when_told_twice(0)
    assert done[0] < 2 and done[1:] == [130] and next(heard, None) is None


def flags(corpus: Path, folder: Path, ranks: int, *more: str) -> list[str]:
    own = ["--data.path", str(corpus), "--run.dir", str(folder), *more]
    return [*FLAGS, *own, "--train.device-batch-size", str(2 // ranks)]


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def rows(folder: Path) -> int:
    return len(records(folder)) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_refused_start_leaves_a_save_alone_and_force_follows_a_stopped_holder(
    corpus: Path, tmp_path: Path
) -> None:
    """The command as it is typed; the other start is in the middle of a save."""
    folder = tmp_path / "run"
    folder.mkdir()
    pending = folder / "checkpoints/step-000007.0123abcd.tmp/shard-00001.safetensors"
    words = flags(corpus, folder, 1, "--run.steps", "2", "--checkpoint.every", "1")
    with holder(folder) as other:
        pending.parent.mkdir(parents=True)
        pending.write_bytes(b"half")
        for more in ([], ["--run.force"]):  # it beats
            refused = forked(*words, *more)
            assert refused.returncode == 2, refused.stderr
            assert f"is in use by process {other.pid} on " in refused.stderr
            assert pending.read_bytes() == b"half" and rows(folder) == 0
        os.kill(other.pid, signal.SIGSTOP)
        assert forked(*words).returncode == 2 and pending.exists()
        done = forked(*words, "--run.force")
        assert done.returncode == 0 and rows(folder) == 2, done.stderr
        os.kill(other.pid, signal.SIGCONT)
        assert other.wait(20) == 2
    assert not pending.exists(), "the holder's save is given up with it"


@pytest.mark.slow
def test_a_second_start_is_refused_and_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    """Then Ctrl-C twice ends the first one at once, and its folder is free."""
    folder = tmp_path / "run"
    words = flags(corpus, folder, 1, "--run.steps", "100000", "--checkpoint.every", "2")
    with background(*words) as first:
        until(lambda: rows(folder) >= 2, first)
        assert status(folder)["state"] == "running" and status(folder)["pid"] == first.pid
        for resume in ("auto", "never"):
            second = forked(*words, "--checkpoint.resume", resume)
            assert second.returncode == 2 and second.stderr.count("\n") == 1, second.stderr
            assert f"is in use by process {first.pid} on " in second.stderr
            assert first.poll() is None and status(folder)["pid"] == first.pid
        before = rows(folder)
        until(lambda: rows(folder) > before, first)
        assert [r["step"] for r in records(folder)] == list(range(rows(folder)))
        began = time.monotonic()
        for _ in range(2):
            first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=60)
        took = time.monotonic() - began
    assert first.returncode == 130 and "stopped: the same command goes on from " in err, err
    assert took < 10  # 2 s and a loaded machine
    left = status(folder)
    assert (left["state"], left["code"]) == ("ended", 130) and lease(folder)["ended"] is True
    assert latest_checkpoint(folder / "checkpoints") is not None


@pytest.mark.slow
def test_a_second_interrupt_needs_no_main_thread() -> None:
    """It waits in C, where no handler runs, as in a collective: a mutex that is locked already."""
    code = (
        "import ctypes; from megacpp.run.preemption import StopRequest; stop = StopRequest();"
        "libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64);"
        "import threading; threading.Timer(1.0, print, ('waits',), {'flush': True}).start();"
        "libc.pthread_mutex_lock(mutex); libc.pthread_mutex_lock(mutex)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.wait(30) == 130
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_told_during_a_save(corpus: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Every step is saved, so the signal comes during a save more often than not."""
    folder = tmp_path / "run"
    words = flags(corpus, folder, 1, "--run.steps", "100000", "--checkpoint.every", "1")
    with background(*words) as first:
        pending = folder / "checkpoints"
        until(lambda: rows(folder) >= 2 and any(pending.glob("*.tmp")), first)
        for _ in range(2):
            first.send_signal(number)
        _, err = first.communicate(timeout=120)
    done = rows(folder)
    saved = latest_checkpoint(folder / "checkpoints")
    assert first.returncode == 75 and saved is not None and saved.name == f"step-{done:06}", err
    assert f"stopped by {number.name} after step {done}: the same command goes on" in err
    assert not list(pending.glob("*.tmp*")) and status(folder)["code"] == 75


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "megacpp train"])
def test_ranks_end_with_their_killed_launcher(corpus: Path, tmp_path: Path, launcher: str) -> None:
    """Kill it: its two ranks are gone within 5 s and save nothing more."""
    folder = tmp_path / "run"
    words = flags(corpus, folder, 2, "--run.steps", "100000")
    ours = in_a_session("-m", "megacpp", "train", *words, "--nproc", "2", env=HERE)
    with background(*words, ranks=2) if launcher == "torchrun" else ours as agent:
        until(lambda: rows(folder) >= 2, agent)
        ranks = children(agent.pid)
        assert len(ranks) == 2
        agent.kill()
        assert ended(ranks, 5), "ranks outlive their launcher"
    assert latest_checkpoint(folder / "checkpoints") is None
    assert status(folder)["state"] == "running" and lease(folder)["ended"] is False
    done = forked(*flags(corpus, folder, 1, "--run.steps", "1"))
    assert done.returncode == 0, done.stderr
    assert status(folder) == status(folder) | {"state": "ended", "code": 0}


@pytest.mark.slow
def test_a_killed_rank_is_named_under_torchrun(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "failures").mkdir(parents=True)
    words = flags(corpus, folder, 2, "--run.steps", "100000")
    with background(*words, ranks=2) as agent:
        until(lambda: rows(folder) >= 2, agent)
        other, lost = children(agent.pid)
        os.kill(lost, signal.SIGKILL)
        assert ended([other], 15), "a rank waits for one that is gone"
        _, err = agent.communicate(timeout=120)
    ours = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1 and ours[0].startswith("error: rank 1 lost: "), err
    assert status(folder)["code"] == 6 and "rank 1 lost" in status(folder)["message"]
    done = forked(*flags(corpus, folder, 1, "--run.steps", "1"))
    assert done.returncode == 0, done.stderr
    assert not list((folder / "failures").glob("rank-*.txt")), "stale after success"
