"""When one rank fails, all leave: one message, a traceback on disk, no hang."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megacpp.config.arguments import parse_run
from megacpp.run.failure import _missing, guarded, is_peer_failure, report, what_is_saved
from megacpp.run.rank_store import RankStore, this_process
from megacpp.state.checkpoint import save_checkpoint
from tests.launch import forked

ROOT = Path(__file__).parents[2]
SMALL = "--model.dim 32 --model.depth 1 --model.pattern F --data.seq-len 64 --run.steps 500"


def test_a_failing_rank_brings_all_down_with_one_message(tmp_path: Path) -> None:
    """Real processes under torchrun; without an exit the waiting ranks would hang ten minutes."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    script = str(Path(__file__).with_name("one_rank_fails.py"))
    done = subprocess.run(
        [sys.executable, *start, script, "tiny", "--run.dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "step 2" in done.stdout and "step 3" not in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "rank 1: RuntimeError: " in errors[0]
    assert "mat1 and mat2 shapes cannot be multiplied" in errors[0]
    kept = tmp_path / "failures" / "rank-1.txt"
    assert str(kept) in errors[0] and "torch.ones(2, 3) @ torch.ones(2, 3)" in kept.read_text()


def test_a_rank_that_lost_its_peer_stays_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacpp.run.failure.PATIENCE_S", 0.0)
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:542] Connection closed by peer [10.0.0.1]")
    assert is_peer_failure(lost) and not is_peer_failure(ValueError("bad shape"))
    for words in (
        "[pair.cc:553] Application timeout caused pair closure",
        "[pair.cc:538] Read error [127.0.0.1]:46233: Connection reset by peer",
        "NCCL communicator was aborted on rank 1.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exited",
    ):
        assert is_peer_failure(RuntimeError(words)), words
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert report(lost, tmp_path) == 6 and capsys.readouterr().err == ""
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (told["errorCode"], told["message"]) == (6, "lost another rank")
    late = RuntimeError("[gloo] Timed out waiting 600000ms for recv operation to complete")
    assert report(late, tmp_path) == 6 and "waited in vain" in capsys.readouterr().err
    assert report(ValueError("bad\nshape"), tmp_path) == 1
    assert capsys.readouterr().err.startswith("error: rank 0: ValueError: bad (")


def test_a_silent_node_is_lost_with_all_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on each of two nodes: this node's are alive, and of the other none is heard."""
    monkeypatch.setattr("megacpp.run.failure.PATIENCE_S", 0.0)
    peers, here = RankStore(), this_process()
    there = replace(here, node="other")
    peers.size, peers.table = 4, [here, here, there, there]
    peers.tell(f"heard/{here.node}", "")
    assert report(RuntimeError("Connection closed by peer"), tmp_path, peers) == 6
    assert "ranks 2, 3 lost: ended without a message" in capsys.readouterr().err


def test_an_interrupt_says_once_where_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    resolved = parse_run(["--run.dir", str(tmp_path)], 1)
    said = []
    for rank in ("0", "0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            guarded(interrupted, resolved)
        assert left.value.code == 130
        said.append(capsys.readouterr().err.strip())
        save_checkpoint(tmp_path / "checkpoints", 5, {"w": torch.zeros(3)}, {}, keep=1)
    saved = tmp_path / "checkpoints" / "step-000005"
    first, second, of_another_rank = said
    assert first == "stopped: nothing was saved yet (--checkpoint.every)"
    assert second == f"stopped: the same command goes on from {saved}"
    assert of_another_rank == ""

    anew = parse_run(["--run.dir", str(tmp_path), "--checkpoint.resume", "never"], 1)
    assert (
        what_is_saved(anew)
        == f"the same command with --checkpoint.resume auto goes on from {saved}"
    )


def test_a_run_that_nobody_reads_ends_in_one_line(corpus: Path, tmp_path: Path) -> None:
    """`train.py ... | head -1`: the header is written by rich, steps by print."""
    flags = f"--data.path {corpus} --model.vocab-size 400 --run.dir {tmp_path / 'run'} {SMALL}"
    done = forked("tiny", *flags.split(), read=1)
    assert done.returncode == 141 and done.stdout.count("\n") == 1
    assert (
        done.stderr == "stopped, the output is closed: nothing was saved yet (--checkpoint.every)\n"
    )
    assert not (tmp_path / "run/failures").exists() and not (tmp_path / "run/final").exists()


def test_a_folder_in_the_place_of_a_file_is_one_line(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run/config.json").mkdir(parents=True)
    flags = f"--data.path {corpus} --model.vocab-size 400 --run.dir {tmp_path / 'run'} {SMALL}"
    done = forked("tiny", *flags.split())
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: path=") and done.stderr.count("\n") == 1
    assert "run/config.json" in done.stderr and "is a directory. Fix: " in done.stderr


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """Check that there is no traceback: it would go to the same disk."""
    assert report(OSError(code, os.strerror(code)), tmp_path / "run") == 4
    err = capsys.readouterr().err
    assert err.startswith(f"error: rank 0: run.dir={tmp_path / 'run'}: ") and err.count("\n") == 1
    assert "Fix: free disk space" in err and not (tmp_path / "run").exists()
    assert report(OSError(errno.EACCES, "Permission denied"), tmp_path) == 1


def test_the_first_rank_that_is_left_speaks_when_the_store_is_gone() -> None:
    """Rank 0 may serve the store; then it takes that along."""
    table = [SimpleNamespace(node="here", alive=lambda rank=rank: rank > 0) for rank in range(3)]
    for rank in (1, 2):
        told = MagicMock(side_effect=ConnectionError)
        peers: Any = SimpleNamespace(rank=rank, size=3, table=table, told=told)
        assert _missing(peers, late=False) == ([0], rank == 1)
