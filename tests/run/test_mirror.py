"""Mirrors in memory: a killed rank or a lost node goes on without a checkpoint, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megacpp.state.mirror import Mirror, _key
from megacpp.state.training import TrainingState
from tests.launch import until
from tests.ranks import children, run_ranks
from tests.run.test_async_save import contents, train
from tests.run.test_cluster import TINY, agent, ended, free_port, recipe
from tests.run.test_remote_run import same, steps

EVERY = ["--checkpoint.mirror-every", "1", "--checkpoint.every", "0"]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGACPP_MIRROR", str(tmp_path / "memory"))
    return tmp_path / "memory"


def killed_at(step: int, rank: int) -> Callable[..., None]:
    """Return `TrainingState.advance` that ends a rank by SIGKILL in a step, before its mirror."""
    advance = TrainingState.advance

    def acting(self: TrainingState, *args: bool, **more: bool) -> None:
        if self.step == step and os.environ.get("RANK", "0") == str(rank):
            self.mirror.thread.finish()  # type: ignore[union-attr]
            os.kill(os.getpid(), signal.SIGKILL)
        advance(self, *args, **more)

    return acting


def test_each_run_folder_has_a_key_of_its_own(tmp_path: Path) -> None:
    runs = tmp_path / "a", tmp_path / "b"
    for run in runs:
        run.mkdir()
    one, other = map(_key, runs)
    assert len(one) == len(other) == 32 and one != other
    assert _key(runs[0]) == one


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_goes_on_from_memory(
    corpus: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """SIGKILL in step 4: nothing is on disk, and the run goes on after step 3."""
    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "advance", killed_at(3, ranks - 1))
        done = train(corpus, tmp_path / "run", ranks, *EVERY)
    assert done.returncode != 0 and not (tmp_path / "run/checkpoints").exists()
    assert "step-000003" in {p.name[:11] for p in memory.glob("*/*")}
    done = train(corpus, tmp_path / "run", ranks, *EVERY)
    assert done.returncode == 0, done.stderr
    assert "step 3 comes from the nodes' memory" in done.stdout
    assert train(corpus, tmp_path / "straight", ranks, "--checkpoint.every", "0").returncode == 0
    assert same(tmp_path / "run", tmp_path / "straight")
    assert not memory.exists()


def test_a_flipped_bit_makes_the_older_step_count(
    corpus: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece whose hash is not that of its name is passed over for the disk."""
    flags = ["--checkpoint.mirror-every", "1", "--checkpoint.every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "advance", killed_at(3, 0))
        assert train(corpus, tmp_path / "run", 1, *flags).returncode != 0
    (piece,) = memory.glob("*/step-000003-*")
    raw = piece.read_bytes()
    piece.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    done = train(corpus, tmp_path / "run", 1, *flags)
    assert done.returncode == 0, done.stderr
    assert "memory:" not in done.stdout and "resumed at step 2 of 5" in done.stdout


def piece_of_rank(rank: int, world: int, folder: Path, flipped: int) -> Any:
    """Mirror a tensor of two nodes, flip a bit of some ranks' own pieces, and load it."""
    os.environ.update(MEGACPP_MIRROR=str(folder / f"node{rank}"), LOCAL_WORLD_SIZE="1")
    mirror, tensors = Mirror(folder / "run", {}), {"w": torch.full((4,), 1.0 + rank)}
    state = SimpleNamespace(step=5, tensors=lambda: tensors, extra=lambda: {"step": 5})
    mirror.copy(cast(TrainingState, state))
    mirror.thread.wait()
    if rank < flipped:
        (piece,) = mirror.folder.glob(f"step-000005-rank-{rank:05}-*")
        raw = piece.read_bytes()
        piece.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    dist.barrier()
    loaded = {"w": torch.zeros(4)}
    found = mirror.newest(folder / "run/checkpoints", loaded)
    return found and found["step"], loaded["w"].tolist()


@pytest.mark.parametrize("flipped", [0, 1, 2])
def test_a_flipped_bit_is_mended_by_the_neighbour(tmp_path: Path, flipped: int) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    found = run_ranks(piece_of_rank, 2, tmp_path, flipped)
    assert found == [(5, [1.0] * 4), (5, [2.0] * 4)]


def nodes(corpus: Path, run: Path, memories: list[Path]) -> list[subprocess.Popen[str]]:
    """Start a run of two nodes with one rank each, whose memories are two folders."""
    flags = ["tiny", *TINY, "--data.path", str(corpus), "--run.dir", str(run), *EVERY]
    options = recipe(free_port(), max_restarts="0", nproc="1")
    words = [*flags, "--run.steps", "60"]
    return [agent(options, words, run.parent, MEGACPP_MIRROR=str(memory)) for memory in memories]


def test_a_lost_node_comes_back_from_its_neighbour(corpus: Path, tmp_path: Path) -> None:
    """Kill both agents and all ranks, and delete the memory of one node."""
    run, memories = tmp_path / "run", [tmp_path / "a", tmp_path / "b"]
    agents = nodes(corpus, run, memories)
    until(lambda: any(p.name > "step-000006" for m in memories for p in m.glob("*/*")), *agents)
    ranks = [pid for one in agents for pid in children(one.pid)]
    for pid in [one.pid for one in agents] + ranks:
        os.kill(pid, signal.SIGKILL)
    ended(agents)
    assert not (run / "checkpoints").exists()
    assert {p.name.split("-rank-")[1][:5] for p in memories[0].glob("*/*")} == {"00000", "00001"}
    shutil.rmtree(memories[1])
    again = nodes(corpus, run, memories)
    said = ended(again)
    assert [one.returncode for one in again] == [0, 0], said
    assert "comes from the nodes' memory" in "".join(said)
    assert not any(memory.exists() for memory in memories)
    straight = nodes(corpus, tmp_path / "straight", memories)
    said = ended(straight)
    assert [one.returncode for one in straight] == [0, 0], said
    last = "checkpoints/step-000060/"
    one, two = (
        {name: value for name, value in contents(folder).items() if name.startswith(last)}
        for folder in (run, tmp_path / "straight")
    )
    assert one == two and len(one) > 2 and steps(run) == steps(tmp_path / "straight")
