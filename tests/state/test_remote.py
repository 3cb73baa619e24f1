"""Checkpoints at a URL: complete at every moment, retained like local ones, and back bit for bit.

The store is the memory of fsspec; runs against an S3 API are in tests/run/test_remote_run.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp import urls
from megacpp.errors import CheckpointError
from megacpp.state.checkpoint import load_checkpoint, save_checkpoint, verify
from megacpp.state.published import candidates, published
from megacpp.state.remote import RemoteRun
from megacpp.state.uploads import Uploads
from tests.ranks import run_ranks

fsspec = pytest.importorskip("fsspec")
CALLS = ("put_file", "pipe_file", "rm_file")  # what changes a store


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "WAIT_S", 0.0)


@pytest.fixture
def remote() -> Iterator[RemoteRun]:
    system = fsspec.filesystem("memory")
    yield RemoteRun("memory://run", system, "/run")
    if system.exists("/run"):
        system.rm("/run", recursive=True)


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((3, 2), float(step)), "optim.w.step": torch.tensor(step)}


def save(run: Path, step: int, keep: int = 2, tokens: int = 96, **more: Any) -> Path:
    def one(rank: int, size: int) -> Path:
        extra = {"step": step, "tokens_per_step": tokens}
        rng = {"of": 0}  # Python's own differs in length between processes
        return save_checkpoint(run / "checkpoints", step, state(step), extra, keep, rng=rng, **more)

    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(step)))
    return run_ranks(one, 1)[0]


def upload(remote: RemoteRun, path: Path, keep: int = 2, keep_every: int = 0) -> int:
    return remote.upload(path, keep, keep_every, lambda done, total: None)


def come_back(remote: RemoteRun, run: Path) -> int:
    """Return the step of the newest checkpoint, downloaded to an empty folder and compared."""
    name = remote.newer(run)
    assert name is not None
    remote.fetch(run, name, lambda line: None)
    path = candidates(run / "checkpoints")[0]
    assert path.name == name and verify(path) == []
    found = state(-1)
    step = load_checkpoint(path, found)["step"]
    assert all(torch.equal(found[key], t) for key, t in state(step).items())
    assert remote.newer(run) is None
    return step


class Broken:
    """A store that fails from some change on, after it took the first half of the bytes."""

    def __init__(self, system: Any, calls: int) -> None:
        self.system, self.left = system, calls

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.system, name)
        if name not in CALLS:
            return act

        def counted(*args: Any) -> Any:
            self.left -= 1
            if self.left >= 0:
                return act(*args)
            if name == "pipe_file":
                act(args[0], args[1][: len(args[1]) // 2])
            if name == "put_file":
                self.system.pipe_file(args[1], Path(args[0]).read_bytes()[:7])
            raise ConnectionError("reset by peer")

        return counted


def test_a_store_that_fails_at_any_change_keeps_the_older_one(
    remote: RemoteRun, tmp_path: Path
) -> None:
    """Every change of the store in turn is the last one: upload, retention, and a replaced step."""
    run, ends = tmp_path / "run", []
    for calls in range(99):
        if remote.system.exists("/run"):
            remote.system.rm("/run", recursive=True)
        upload(remote, save(run, 1, keep=0))
        upload(remote, save(run, 2, keep=1), keep=1)
        again = save(run, 3, keep=1)
        broken = RemoteRun(remote.url, Broken(remote.system, calls), remote.root)
        try:
            upload(broken, again, keep=1)
        except ConnectionError:
            ends.append(come_back(remote, tmp_path / f"back-{calls}"))
        else:
            break
    assert set(ends) == {2, 3} and ends == sorted(ends) and calls > 4
    assert remote.names() == ["step-000003"]


def test_a_step_that_is_saved_again_is_never_mixed(remote: RemoteRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    upload(remote, save(run, 1))
    upload(remote, save(run, 2))
    other = save(run, 2, tokens=97)  # as many bytes, and others
    for calls in range(99):
        broken = RemoteRun(remote.url, Broken(remote.system, calls), remote.root)
        try:
            upload(broken, other)
        except ConnectionError:
            assert come_back(remote, tmp_path / f"back-{calls}") in (1, 2)
            remote.system.rm(f"/run/checkpoints/{other.name}", recursive=True)
            upload(remote, save(run, 2))
            other = save(run, 2, tokens=97)
        else:
            break
    assert calls > 3 and come_back(remote, tmp_path / "whole") == 2


def test_retention_follows_that_of_a_run_folder(remote: RemoteRun, tmp_path: Path) -> None:
    """Steps 3 and 6 are kept for ever; step 9 belongs to a course that is given up."""
    run = tmp_path / "run"
    for step in (1, 2, 3, 4, 5, 6, 8, 10, 7):
        upload(remote, save(run, step, keep_every=3), keep_every=3)
        here = {path.name for path in published(run / "checkpoints")}
        assert set(remote.names()) == here, step
    assert sorted(here) == [f"step-{n:06d}" for n in (3, 6, 7)]


def test_a_new_machine_keeps_what_was_kept(remote: RemoteRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 3, 4, 5):
        upload(remote, save(run, step, keep=3, keep_every=2), 3, 2)
    new = tmp_path / "new"
    assert come_back(remote, new) == 5
    upload(remote, save(new, 6, keep=3, keep_every=2), 3, 2)
    assert sorted(remote.names()) == [f"step-{n:06d}" for n in (2, 4, 5, 6)]


def test_a_step_that_this_folder_went_back_from_stays_away(
    remote: RemoteRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    upload(remote, save(run, 5))
    save(run, 3)  # after a rewind: `latest` names step 3, which is not uploaded yet
    assert remote.newer(run) is None
    assert remote.newer(tmp_path / "other") == "step-000005"


def test_a_flipped_bit_is_named(remote: RemoteRun, tmp_path: Path) -> None:
    path = save(tmp_path / "run", 1)
    upload(remote, path)
    file = next(path.glob("*.safetensors")).name
    there = f"/run/checkpoints/{path.name}/{file}"
    raw = remote.system.cat_file(there)
    remote.system.pipe_file(there, raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{file}: is corrupt \(SHA-256 differs\).*Fix:"):
        remote.fetch(tmp_path / "new", path.name, lambda line: None)
    assert list((tmp_path / "new/checkpoints").iterdir()) == []


def test_bytes_that_a_store_loses_name_nothing_complete(remote: RemoteRun, tmp_path: Path) -> None:
    path = save(tmp_path / "run", 1)

    class Lossy(Slow):
        def put_file(self, here: str, there: str) -> None:
            self.system.pipe_file(there, Path(here).read_bytes()[:-1])

    with pytest.raises(OSError, match="hasn't the bytes that were sent"):
        upload(RemoteRun(remote.url, Lossy(remote.system), remote.root), path)
    assert remote.names() == []
    upload(remote, path)
    assert remote.names() == ["step-000001"]
    remote.system.rm_file(f"/run/checkpoints/{path.name}/extra.json")
    assert remote.names() == []


class Slow:
    """A store whose files wait until they are let through."""

    def __init__(self, system: Any) -> None:
        self.system, self.gate, self.waiting = system, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)

    def put_file(self, here: str, there: str) -> None:
        self.waiting.set()
        assert self.gate.wait(60)
        self.system.put_file(here, there)


def test_the_newest_wins_and_retention_spares_what_is_read(
    remote: RemoteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saves 2 to 5 come while 1 is uploaded: 1 and 5 arrive, and the next save deletes both."""
    run, slow = tmp_path / "run", Slow(remote.system)
    uploads = Uploads(RemoteRun(remote.url, slow, remote.root), keep=1, keep_every=0)
    for step in range(1, 6):
        uploads.offer(save(run, step, keep=1, spare=uploads.held))
        assert slow.waiting.wait(60)
    assert [p.name for p in published(run / "checkpoints")][-1] == "step-000001"
    slow.gate.set()
    assert uploads.finish(run) and uploads.held == frozenset()
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["step-000001", "step-000005"]
    assert remote.names() == ["step-000005", "step-000001"]
    uploads.offer(save(run, 6, keep=1, spare=uploads.held))
    assert uploads.finish(run) and remote.names() == ["step-000006"]
    assert [path.name for path in published(run / "checkpoints")] == ["step-000006"]


def test_a_failed_upload_is_one_line_and_the_next_one_is_tried(
    remote: RemoteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, broken = tmp_path / "run", Broken(remote.system, 0)
    uploads = Uploads(RemoteRun(remote.url, broken, remote.root), keep=2, keep_every=0)
    uploads.offer(save(run, 1))
    assert not uploads.finish(run)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("warning: step-000001 isn't at memory://run (ConnectionError: reset")
    assert "Fix: start the same command again" in last
    broken.left = 999
    uploads.offer(save(run, 2))
    assert uploads.finish(run) and remote.names() == ["step-000002"]
