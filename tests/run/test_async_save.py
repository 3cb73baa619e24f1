"""Asynchronous saves of whole runs: the files of synchronous ones, and their errors.

Runs are forked (tests/launch.py), so what a test slows down or breaks reaches them.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megacpp.state import behind, checkpoint
from megacpp.state.checkpoint import verify
from megacpp.state.published import latest_checkpoint
from megacpp.state.training import TrainingState
from tests.launch import Done, forked
from tests.run.test_preemption import FLAGS
from tests.test_run import records


def train(corpus: Path, folder: Path, ranks: int, *flags: str) -> Done:
    words = ["--data.path", str(corpus), "--run.dir", str(folder), "--run.steps", "5"]
    words += ["--train.device-batch-size", str(2 // ranks), "--checkpoint.every", "2"]
    return forked(*FLAGS, *words, "--checkpoint.keep", "0", *flags, ranks=ranks)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of all checkpoints."""
    files = (path for path in (folder / "checkpoints").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def in_thread() -> bool:
    return threading.current_thread() is not threading.main_thread()


def before_publishing(act: Callable[[], None]) -> Callable[..., None]:
    """Return `_finish` of a save that acts first, where the save is an asynchronous one."""
    finish = checkpoint._finish

    def acting(*args: object) -> None:
        if in_thread():
            act()
        finish(*args)  # type: ignore[arg-type]

    return acting


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_are_those_of_a_synchronous_run(
    corpus: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps go on while a slow disk writes: their new weights must not reach it."""
    assert train(corpus, tmp_path / "sync", ranks).returncode == 0
    wrote = tmp_path / "wrote"
    slow = before_publishing(lambda: (time.sleep(0.5), wrote.open("a").write("1"))[0])
    monkeypatch.setattr(checkpoint, "_finish", slow)
    write = checkpoint._write_tensors

    def late(*args: object) -> float:
        time.sleep(0.3 * in_thread())
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "_write_tensors", late)
    done = train(corpus, tmp_path / "async", ranks, "--checkpoint.async")
    assert done.returncode == 0, done.stderr
    assert wrote.read_text() == "11"  # of steps 2 and 4; the last one is synchronous
    one, two = contents(tmp_path / "sync"), contents(tmp_path / "async")
    assert len(one) >= 3 * 3 and one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_write_ends_the_run_at_a_next_step(
    corpus: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_finish", before_publishing(full))
    flags = ["--checkpoint.async", "--run.steps", "199", "--checkpoint.every", "100"]
    done = train(corpus, tmp_path / "run", ranks, *flags)
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("\n") == 1 and "No space left on device. Fix: free" in done.stderr
    assert 100 < len(records(tmp_path / "run")) < 199
    left = [p.name for p in (tmp_path / "run/checkpoints").iterdir()]
    assert left == [], left


def test_an_error_of_a_step_waits_for_the_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the step after the save: the save is published all the same."""
    monkeypatch.setattr(checkpoint, "_finish", before_publishing(lambda: time.sleep(1)))
    advance = TrainingState.advance

    def broken(self: TrainingState, *args: bool, **more: bool) -> None:
        if self.step == 2:
            raise AssertionError("a bug")
        advance(self, *args, **more)

    monkeypatch.setattr(TrainingState, "advance", broken)
    done = train(corpus, tmp_path / "run", 1, "--checkpoint.async")
    assert done.returncode == 1 and "a bug" in done.stderr
    saved = latest_checkpoint(tmp_path / "run/checkpoints")
    assert saved is not None and saved.name == "step-000002" and verify(saved) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_waits_for_the_save(
    corpus: Path, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

    monkeypatch.setattr(checkpoint, "_finish", before_publishing(told))
    flags = ["--checkpoint.async", "--run.steps", "199", "--checkpoint.every", "100"]
    done = train(corpus, tmp_path / "run", ranks, *flags)
    assert done.returncode == 75, done.stderr
    steps = len(records(tmp_path / "run"))
    names = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["latest", "step-000100", f"step-{steps:06d}"] and 100 < steps < 199
    assert all(verify(tmp_path / "run/checkpoints" / name) == [] for name in names[1:])


def test_killed_during_a_save_the_run_goes_on_from_the_one_before(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run/checkpoints"

    def die() -> None:
        if (folder / "step-000002").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_finish", before_publishing(die))
        assert train(corpus, tmp_path / "run", 1, "--checkpoint.async").returncode == -9
    saved = latest_checkpoint(folder)
    assert saved is not None and saved.name == "step-000002" and verify(saved) == []
    assert [p.name for p in folder.iterdir() if ".tmp" in p.name]
    again = train(corpus, tmp_path / "run", 1, "--checkpoint.async")
    assert again.returncode == 0, again.stderr
    assert not [p.name for p in folder.iterdir() if ".tmp" in p.name]
    whole = train(corpus, tmp_path / "whole", 1)
    assert whole.returncode == 0
    one, two = (contents(tmp_path / name) for name in ("run", "whole"))
    assert [name for name in one if one[name] != two[name]] == []


def test_one_save_is_in_flight_at_a_time() -> None:
    writer, order = behind.SaveThread(), list[str]()
    release = threading.Event()
    writer.start(lambda: (release.wait(60), order.append("first")))
    with pytest.raises(AssertionError):
        writer.start(lambda: None)
    release.set()
    writer.wait()
    writer.start(lambda: order.append("second"))
    writer.wait()
    assert order == ["first", "second"]


def test_a_save_keeps_to_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP waits for the stream of a thread's current GPU: the first one, unless it is told."""
    order: list[tuple[object, bool]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: order.append((gpu, in_thread())))
    writer = behind.SaveThread()
    writer.start(lambda: order.append(("wrote", in_thread())))
    writer.wait()
    assert order == [(3, True), ("wrote", True)]
