"""Ranks that meet before their process group: threads as ranks on a real store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacpp.config.arguments import parse_run, replace_keys
from megacpp.errors import DataError, MegacppError
from megacpp.launch.folder import open_folder, start_point
from megacpp.run.rank_store import Process, RankStore, _handshake, this_process
from megacpp.state.checkpoint import save_checkpoint

HERE = this_process()


def on_ranks(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Return what the ranks return; one that waits in vain fails the test within 20 seconds."""
    found = [Future[Any]() for _ in range(size)]

    def run(rank: int) -> None:
        try:
            found[rank].set_result(body(rank))
        except BaseException as error:
            found[rank].set_exception(error)

    for rank in range(size):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    return [one.result(20) for one in found]


def peers_of(
    store: dist.Store, rank: int, size: int, nodes: int = 1, restarts: int = 0
) -> RankStore:
    """Return a rank as `RankStore()` makes it, without a launcher's environment."""
    one = RankStore.__new__(RankStore)
    one.rank, one.size, one.store, one.home, one.lock = rank, size, store, None, None
    one.table = [Process(f"n{r % nodes}", f"h{r % nodes}", HERE.pid, restarts) for r in range(size)]
    return one


def test_a_second_start_hears_nothing_of_the_first() -> None:
    """Reuse the launcher's store with all keys of the first start."""
    store = dist.HashStore()
    starts = [on_ranks(3, lambda rank: _handshake(store, rank, 3)) for _ in range(2)]
    names = [{name for name, _ in start} for start in starts]
    assert len(names[0]) == len(names[1]) == 1 and names[0] != names[1]
    assert all(len(table) == 3 for start in starts for _, table in start)


def test_a_rank_of_an_earlier_start_is_not_answered() -> None:
    """Rank 1 is there before rank 0 of its own start, and finds the earlier one's name."""
    store = dist.HashStore()
    on_ranks(2, lambda rank: _handshake(store, rank, 2))
    found: list[str] = []
    late = threading.Thread(target=lambda: found.append(_handshake(store, 1, 2)[0]))
    late.start()
    late.join(0.3)
    assert late.is_alive()
    name, _ = _handshake(store, 0, 2)
    late.join(60)
    assert found == [name]


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_one_rank_lacks_ends_all_with_its_code(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(4 // nodes))
    store = dist.HashStore()

    def body(rank: int) -> MegacppError | None:
        try:
            with peers_of(store, rank, 4, nodes).agree("start"):
                if rank == 3:
                    raise DataError("data.path=x: no corpus")
        except MegacppError as error:
            return error
        return None

    errors = on_ranks(4, body)
    where = "rank 3 on h1: " if nodes == 2 else ""
    assert {str(error) for error in errors} == {f"{where}data.path=x: no corpus"}
    assert all(error.exit_code == 3 and error.agreed for error in errors)


def opened(folder: Path, print_of: Callable[[int], str], **given: Any) -> list[str]:
    """Return the messages of two ranks about a run folder and corpora with these fingerprints."""
    store = dist.HashStore()
    config = replace_keys(parse_run(["tiny"], 2).config, {"run.dir": str(folder), **given})

    def body(rank: int) -> str:
        peers = peers_of(store, rank, 2, restarts=given == {})
        try:
            open_folder(peers, config, print_of(rank))
        except MegacppError as error:
            return f"{error.exit_code} {error}"
        finally:
            if peers.lock is not None:
                peers.lock.release()
        return ""

    return on_ranks(2, body)


def test_the_run_folder_and_the_corpus_are_everyones(tmp_path: Path) -> None:
    assert opened(tmp_path / "run", lambda _: "abc") == ["", ""]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.lock", "status.json"}
    said = opened(tmp_path / "run", lambda rank: f"abc{rank}")
    assert said[0] == said[1] and said[0].startswith("3 data.path=") and "isn't rank 0's" in said[0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["status.json"], "the first's"
    blocked = tmp_path / "file"
    blocked.write_text("")
    said = opened(blocked / "run", lambda _: "abc")
    assert said[0] == said[1] and said[0].startswith(f"2 run.dir={blocked}/run: is not usable")


def test_a_replay_does_not_cut_the_records_of_its_run(tmp_path: Path) -> None:
    """Steps that are made again and not saved need a folder of their own."""
    run = tmp_path / "run"
    run.mkdir()
    for step in (4, 8):
        save_checkpoint(run / "checkpoints", step, {"w": torch.zeros(3)}, {}, keep=0)

    def said(folder: Path, step: int, until: int) -> list[str]:
        source = str(run / f"checkpoints/step-{step:06d}")
        given = {"checkpoint.resume": source, "run.until": until}
        return opened(folder, lambda _: "abc", **given)

    first, other = said(run, 4, 6)
    assert first == other and first.startswith(f"2 run.until=6: {run} has step 8, a later one than")
    assert first.endswith("Fix: use another --run.dir.") and [*run.iterdir()] == [
        run / "checkpoints"
    ]
    for folder, step, until in ((tmp_path / "again", 4, 6), (run, 8, 9), (run, 4, 0)):
        assert said(folder, step, until) == ["", ""]


def test_a_restart_never_sets_its_own_run_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    store = dist.HashStore()
    asked = {"run.dir": str(run), "checkpoint.resume": "never"}
    config = replace_keys(parse_run(["tiny"], 1).config, asked)
    again = peers_of(store, 0, 1, restarts=1)
    open_folder(again, config, "abc")
    assert run.is_dir() and start_point(again, config) == "auto" and again.lock is not None
    with pytest.raises(MegacppError, match="is in use by process"):
        open_folder(peers_of(dist.HashStore(), 0, 1), config, "abc")
    again.lock.release()
    first = peers_of(dist.HashStore(), 0, 1)
    open_folder(first, config, "abc")
    assert start_point(first, config) == "never"
    assert json.loads((tmp_path / "run.old-1/run.lock").read_text())["ended"] is True
    other = replace_keys(config, {"checkpoint.resume": "elsewhere"})
    assert start_point(again, other) == "elsewhere", "nothing of its own was saved"
    (run / "checkpoints").mkdir()
    (run / "checkpoints/latest").write_text("step-000002\n")
    assert start_point(again, other) == "auto"
