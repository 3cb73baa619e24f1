"""Launches on several nodes, from outside: launchers on the loopback address are the nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import ROOT, finished, forked, until
from tests.run.test_preemption import children
from tests.test_run import ADAMW, SMALL, records

pytestmark = pytest.mark.slow

TINY = [*SMALL, "--model.depth", "2", "--model.pattern", "AF", *ADAMW, "--memory.calibration="]
TINY += ["--run.eval-rows", "8", "--run.tensorboard", "false", "--train.device-batch-size", "1"]
SSH = (ROOT / "docs/launch/ssh.md").read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def recipe(port: int, **changed: str) -> list[str]:
    """Options of `megacpp train` in docs/launch/ssh.md, for two ranks a node on loopback."""
    match = re.search(r"megacpp train nam56r (.*?) --run\.dir", SSH)
    assert match is not None
    given = dict(word[2:].split("=", 1) for word in match[1].split())
    assert given["rdzv-endpoint"] == "$HOST:29500"
    for flag in ("log-dir", "tee", "local-ranks-filter"):  # the test reads what it prints
        del given[flag]
    given |= {"nproc": "2", "rdzv-endpoint": f"127.0.0.1:{port}"}
    given |= {name.replace("_", "-"): value for name, value in changed.items()}
    return [f"--{name}={value}" for name, value in given.items()]


def agent(
    options: Sequence[str], flags: Sequence[str], cwd: Path, **env: str
) -> subprocess.Popen[str]:
    """Start a node in `cwd`: its launcher, with a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "megacpp", "train", *flags, *options],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
    )


def ended(agents: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Return each process's output; all have ended afterwards.

    A launcher that waits for another node computes nothing. But no such wait is as long as
    `STILL_S`: a node that is killed counts as lost after six seconds (`rdzv_conf`).
    """
    try:
        return [out for out, _ in finished(*agents)]
    finally:
        for one in agents:
            one.kill()


def test_nodes_without_a_shared_run_folder_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Use the same relative path in two folders: a disk of each node's own."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    flags = ["tiny", *TINY, "--data.path", str(corpus), "--run.dir", "runs/own"]
    options = recipe(free_port(), max_restarts="0")
    agents = [agent(options, flags, node) for node in nodes]
    said = ended(agents)
    lines = [x for out in said for x in out.splitlines() if x.startswith("error: ")]
    codes = [one.returncode for one in agents]
    assert 2 in codes and set(codes) <= {2, 6}, codes
    if 6 in codes:  # the other lost the store before it saw its own rank end
        lines = [x for x in lines if not x.startswith("error: rdzv-endpoint=")]
    assert len(lines) == 1, "\n".join(said)
    assert "run.dir=runs/own: isn't the folder that rank 0 made" in lines[0]
    assert not list(tmp_path.glob("*/runs/own/*")), "nothing was started"


def test_a_run_goes_on_when_a_node_is_killed(corpus: Path, tmp_path: Path) -> None:
    """Four ranks, then two: the losses are those of one process that nobody disturbed."""
    folder, steps, port = tmp_path / "run", 16, free_port()
    flags = ["tiny", *TINY, "--data.path", str(corpus), "--checkpoint.every", "2"]
    flags += ["--run.steps", str(steps)]  # tokens a step: what four ranks make of it, also on two
    times = "join_timeout=600,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
    options = [recipe(port, nnodes="1:2", rdzv_conf=f"{times},is_host={host}") for host in (1, 0)]
    agents = [agent(o, [*flags, "--run.dir", str(folder)], tmp_path) for o in options]
    try:
        until(lambda: (folder / "metrics.jsonl").exists() and len(records(folder)) >= 3, *agents)
        lost = agents.pop()
        for process in [lost.pid, *children(lost.pid)]:
            os.kill(process, signal.SIGKILL)
        lost.wait()
    finally:
        out = ended(agents)[0]
    assert agents[0].returncode == 0, out
    first = json.loads((folder / "launch.json").read_text())
    (again,) = (json.loads(path.read_text()) for path in folder.glob("launch-0*.json"))
    if first["world_size"] == 2:
        pytest.skip("the second launcher started too late to be waited for")
    assert (first["world_size"], again["world_size"]) == (4, 2)
    assert 2 <= again["first_step"] < steps and "resumed at step" in out
    assert "lost" in next(line for line in out.splitlines() if line.startswith("error: "))

    whole = [*flags, "--run.dir", str(tmp_path / "whole"), "--train.tokens-per-step", str(4 * 48)]
    done = forked(*whole)
    assert done.returncode == 0, done.stderr
    for one, two in zip(records(folder), records(tmp_path / "whole"), strict=True):
        assert one["step"] == two["step"] and one["tokens"] == two["tokens"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-12), one["step"]


def test_a_killed_launcher_is_started_again_and_joins_the_other(
    corpus: Path, tmp_path: Path
) -> None:
    """Kill the launcher that doesn't serve the store; the other one waits and goes on."""
    folder, steps, port = tmp_path / "run", 24, free_port()
    flags = ["tiny", *TINY, "--data.path", str(corpus), "--checkpoint.every", "2"]
    flags += ["--run.steps", str(steps), "--run.dir", str(folder)]
    times = "join_timeout=600,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6"
    more = {"nnodes": "2", "nproc": "1", "max_restarts": "3"}
    options = [recipe(port, rdzv_conf=f"{times},is_host={host}", **more) for host in (1, 0)]
    agents = [agent(one, flags, tmp_path) for one in options]
    try:
        until(lambda: (folder / "metrics.jsonl").exists() and len(records(folder)) >= 3, *agents)
        agents[1].kill()
        agents[1].wait()
        agents[1] = agent(options[1], flags, tmp_path)
    finally:
        out = ended(agents)
    assert [one.returncode for one in agents] == [0, 0], "\n".join(out)
    assert [row["step"] for row in records(folder)] == list(range(steps))
    starts = [*folder.glob("launch*.json")]
    assert len(starts) == 2, "one start before and one after it, none in vain"


def test_megacpp_train_from_another_folder_names_the_rank_that_was_killed(
    corpus: Path, tmp_path: Path
) -> None:
    """Start beside another project's `parallel`; paths are relative to that folder."""
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel/__init__.py").write_text("raise ImportError('not this one')\n")
    (tmp_path / "corpus").symlink_to(corpus)
    words = ["-m", "megacpp", "train", "tiny", "--nproc", "2", *TINY]
    words += ["--data.path", "corpus", "--run.dir", "runs/far", "--run.steps", "5000"]
    words += ["--checkpoint.every", "1000"]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = tmp_path / "runs/far/metrics.jsonl"
        until(lambda: metrics.exists() and bool(metrics.read_text()), process)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        ((_, err),) = finished(process)
    finally:
        process.kill()
    assert process.returncode == 6, err
    assert err.startswith("error: rank 0 lost: ") and err.count("\n") == 1, err


def test_megacpp_train_ends_with_the_code_and_the_line_of_its_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megacpp", "train", "tiny", "--nproc=2", "--data.path", "nowhere"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: data.path=nowhere: ") and done.stderr.count("\n") == 1
