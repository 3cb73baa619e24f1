"""Crash during a save, at any moment: a checkpoint remains that verifies and loads."""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from megacpp.errors import CheckpointError
from megacpp.state import checkpoint
from megacpp.state.behind import SaveThread, host_copies
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint, verify
from megacpp.state.published import latest_checkpoint
from tests.figures import Record
from tests.ranks import RankError, run_ranks

# What Python reports before it touches the file system; os.replace reports os.rename.
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
UNTOUCHED, HARMLESS, STOPPED = 0, 3, 9
KILLS = int(os.environ.get("MEGACPP_KILLS", "40"))  # in one test


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((3, 2), float(step)), "optim.w.step": torch.tensor(step)}


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, state(step), {"step": step}, keep)


def loaded_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, after it was verified, loaded and compared."""
    path = latest_checkpoint(folder)
    assert path is not None and verify(path) == []
    found = state(-1)
    step = load_checkpoint(path, found)["step"]
    assert all(torch.equal(found[name], t) for name, t in state(step).items())
    return step


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints 1 and 2."""
    folder = tmp_path / "checkpoints"
    save(folder, 1), save(folder, 2)
    return folder


def interrupted(folder: Path, step: int, call: int, act: Callable[[], None], keep: int) -> int:
    """Saves in a forked process that runs `act` before its `call`-th file system call.

    Returns:
        How it ended: UNTOUCHED (fewer calls than that), HARMLESS (saved all the same), STOPPED (a
        CheckpointError of one line) or -SIGKILL; anything else is a failure.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in EVENTS and str(args[0]).startswith(str(folder)):
            seen += 1
            if seen == call:
                act()

    sys.addaudithook(hook)
    code = 1
    try:
        save(folder, step, keep)
        code = UNTOUCHED if seen < call else HARMLESS
    except CheckpointError as error:
        code = STOPPED if "\n" not in str(error) and "No space left" in str(error) else 2
    finally:
        os._exit(code)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("act", "ended"), [(die, -signal.SIGKILL), (disk_full, STOPPED)])
@pytest.mark.parametrize(
    ("step", "keep"),
    [(3, 2), (2, 2), (3, 1)],
    ids=["a-new-step", "the-same-step-again", "the-only-one-that-stays"],
)
def test_interrupted_before_every_file_system_call(
    two: Path,
    tmp_path: Path,
    step: int,
    keep: int,
    act: Callable[[], None],
    ended: int,
    record_property: Record,
) -> None:
    outcomes = []
    for call in range(1, 200):
        folder = tmp_path / str(call) / "checkpoints"
        shutil.copytree(two, folder)
        outcome = interrupted(folder, step, call, act, keep)
        reached = loaded_step(folder)
        if outcome == UNTOUCHED:
            assert reached == step
            break
        assert outcome in (ended, HARMLESS), f"call {call}"
        assert reached == step if outcome == HARMLESS else reached in (2, step)
        outcomes.append(reached)
        save(folder, 4)  # the next save clears what was left behind
        assert loaded_step(folder) == 4
        assert not [p.name for p in folder.iterdir() if ".tmp" in p.name]
    assert len(outcomes) >= 15
    if step == 3:
        assert set(outcomes) == {2, 3}  # before and after it was published
    record_property(
        "saves ended before a file system call (kill -9 or a full disk), resumed", len(outcomes)
    )


def behind_the_step(folder: Path, step: int) -> None:
    """Save from copies in a thread, as `--checkpoint.async` does."""
    copies, writer = host_copies(state(step)), SaveThread()
    writer.start(lambda: save_checkpoint(folder, step, copies, {"step": step}, 2))
    writer.wait()


@pytest.mark.parametrize("write", [save, behind_the_step], ids=["sync", "async"])
def test_killed_at_any_time(
    write: Callable[[Path, int], object], two: Path, record_property: Record
) -> None:
    """Kill the save of one step after another with -9, at random before it would end."""
    draw, took_s, killed = random.Random(0), 0.0, 0
    for step in range(3, 3 + KILLS):
        before, began = loaded_step(two), time.monotonic()
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                write(two, step)
            os._exit(0)
        if took_s:  # the first is timed
            time.sleep(draw.uniform(0, took_s))
            os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] == signal.SIGKILL:
            killed += 1
        else:
            took_s = time.monotonic() - began
        assert loaded_step(two) in (before, step)
    assert killed
    record_property("kill -9 at random in a save, resumed", killed)


def test_a_save_writes_to_a_folder_of_its_own(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another start in the same folder can't write into it, nor publish a mixture."""
    publish, pending = checkpoint.publish_folder, []

    def published(folder: Path, final: Path) -> None:
        pending.append(folder.name)
        publish(folder, final)

    monkeypatch.setattr(checkpoint, "publish_folder", published)
    save(two, 3)
    save(two, 3)
    assert len(set(pending)) == 2
    assert all(re.fullmatch(r"step-000003\.\w{8}\.tmp", name) for name in pending)


def test_a_failed_save_clears_its_folder(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write_manifest", lambda *_: disk_full())
    with pytest.raises(
        CheckpointError, match=r"step-000003\.\w+\.tmp: .* No space left on device. Fix:"
    ):
        save(two, 3)
    assert sorted(p.name for p in two.iterdir()) == ["latest", "step-000001", "step-000002"]


def test_too_little_space_is_refused_before_writing(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(two)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=34))
    with pytest.raises(CheckpointError, match="needs 35 bytes, the disk has 34 free"):
        save(two, 3)
    assert loaded_step(two) == 2


def test_an_error_on_one_rank_is_the_same_error_on_all(two: Path) -> None:
    def body(rank: int, world: int) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(HuggingFaceStorageWriter, "write_data", lambda *_: disk_full())
            with pytest.raises(CheckpointError) as error:
                save(two, 3)
        return str(error.value)

    one, other = run_ranks(body, 2)
    assert one == other and "No space left on device on rank 1" in one and "\n" not in one
    assert loaded_step(two) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_during_a_save_is_no_failed_save(two: Path, ranks: int) -> None:
    """Reach one rank inside DCP, which wraps it as an error of its own."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def body(rank: int, world: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == world - 1:
                patch.setattr(HuggingFaceStorageWriter, "write_data", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save(two, 3)

    run_ranks(body, ranks)
    assert loaded_step(two) == 2


@pytest.mark.parametrize("moment", ["_write_tensors", "hash_file", "rng_state"])
def test_a_rank_killed_while_it_saves(two: Path, moment: str, record_property: Record) -> None:
    """Kill one rank: the other gets an error, not a hang; the checkpoints are unchanged."""

    def body(rank: int, world: int) -> None:
        if rank == 1:
            setattr(checkpoint, moment, lambda *_: die())
        save(two, 3)

    with pytest.raises(RankError):
        run_ranks(body, 2)
    assert loaded_step(two) == 2
    run_ranks(lambda rank, world: save(two, 3), 2)
    assert loaded_step(two) == 3
    record_property("ranks killed inside a save, resumed", 1)


def test_a_slow_disk_is_named(two: Path) -> None:
    """The clock of one rank runs in steps of four seconds; the save is complete."""

    def body(rank: int, world: int) -> str:
        clock = itertools.count(0.0, 4.0 if rank == 1 else 0.0)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
            patch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: next(clock)))
            save(two, 3)
        return said.getvalue()

    first, other = run_ranks(body, 2)
    assert first == (
        "step 3: warning: the disk of rank 1 is slow: its part of the checkpoint took 8 s, that of "
        "the others 0 s\n"
    )
    assert other == "" and loaded_step(two) == 3


# ---- retention ----------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [1, 2, 3, 4, 5]), (1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_the_newest_stay(
    tmp_path: Path, keep: int, left: list[int], record_property: Record
) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep)
        assert loaded_step(tmp_path) == step
    assert names(tmp_path) == ["latest", *(f"step-{step:06d}" for step in left)]
    record_property("saves after which the newest checkpoint verified", 5)


def test_overtaken_checkpoints_of_the_future_go_first(tmp_path: Path) -> None:
    """After going back to step 20, steps 30 and 40 belong to a past that was given up."""
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=0)
    save(tmp_path, 25, keep=3)
    assert names(tmp_path) == ["latest", "step-000010", "step-000020", "step-000025"]
    assert loaded_step(tmp_path) == 25


def test_foreign_and_unfinished_folders_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    for name in ("step-000009", "step-final", "backup.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("mine")
    (tmp_path / "latest").write_text("../elsewhere\n")
    assert latest_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1)
    mine = ["backup.tmp", "latest", "step-000003", "step-000009", "step-final"]
    assert names(tmp_path) == mine and loaded_step(tmp_path) == 3


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
