"""An elastic restart of a fitted run: two forked launchers as nodes, one of them killed.

A node is `torchrun --nnodes=1:2 --nproc-per-node=1` without its interpreter: the launcher's own
elastic agent in a forked process, whose ranks and candidates are forked too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megacpp.launch import trial
from megacpp.run import failure
from tests.launch import ROOT
from tests.ranks import LONG_S, Stillness, children
from tests.run.test_cluster import free_port
from tests.run.test_fit_runs import Forked
from tests.test_run import ADAMW, SMALL, records

STEPS = 200  # more than pass while a crowded machine forgets the test that kills a node
FORK = multiprocessing.get_context("fork")


def rank(flags: Sequence[str], log: Path) -> None:
    """`train.py` as a rank of its launcher, which waits for a return where a process would exit."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.argv = ["train.py", *flags]
    trial.spawn, failure._leave = candidate, leave
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        if end.code:
            os._exit(end.code if isinstance(end.code, int) else 1)


def leave(code: int) -> None:
    sys.stdout.flush()
    raise SystemExit(code)


def candidate(arguments: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> Forked:
    """A rank of a candidate's four steps, forked where an interpreter is started."""
    return Forked(four_steps, arguments, dict(environment), log.name)


def four_steps(arguments: Sequence[str], environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    rank(arguments, Path(log))
    os._exit(0)


def node(is_host: bool, port: int, flags: Sequence[str], log: Path) -> BaseProcess:
    """A started launcher."""
    times = {"join_timeout": 600, "last_call_timeout": 15, "is_host": is_host}
    times |= {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        run_id="fit",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs=times,
        max_restarts=3,
        monitor_interval=0.1,
        start_method="fork",
    )
    process = FORK.Process(target=elastic_launch(config, rank), args=(list(flags), log))
    process.start()
    return process


def until(what: Callable[[], bool], nodes: Sequence[BaseProcess], log: Path) -> None:
    """Wait until something is true; the first launcher must not end before, nor its ranks hang.

    Launchers without ranks aren't looked at: the one that is left computes nothing for 15 seconds,
    in which another could join (`last_call_timeout`), and that is longer than `STILL_S`.
    """
    deadline, still = time.monotonic() + LONG_S, Stillness()
    while not what():
        ranks = [pid for one in nodes for pid in children(one.pid)]
        if not ranks:
            still = Stillness()
        late = still.hangs(ranks) or time.monotonic() > deadline
        if late or not nodes[0].is_alive():
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            said = log.read_text() if log.exists() else ""
            raise AssertionError("hangs" if late else "has ended", said)
        time.sleep(0.05)


@pytest.mark.slow
def test_the_fit_runs_again_on_the_ranks_that_are_left(corpus: Path, tmp_path: Path) -> None:
    folder, log, port = tmp_path / "run", tmp_path / "log", free_port()
    two = "--model.depth 2 --model.pattern AE --train.tokens-per-step 384 --run.eval-rows 2".split()
    few = ["--run.steps", str(STEPS), "--run.sample-tokens", "0", "--memory.device-gib", "1"]
    kept = ["--memory.calibration", str(tmp_path / "calibration"), "--checkpoint.every", "2"]
    kept += ["--memory.fit-candidates", "1"]
    paths = ["--data.path", str(corpus), "--run.dir", str(folder), "--run.tensorboard", "false"]
    flags = ["tiny", *SMALL, *two, *few, *ADAMW, *kept, *paths, "--fit", "auto"]
    nodes = [node(is_host, port, flags, log) for is_host in (True, False)]
    try:
        until(lambda: (folder / "metrics.jsonl").exists() and len(records(folder)) >= 4, nodes, log)
        assert nodes[1].pid is not None
        for process in [*children(nodes[1].pid), nodes[1].pid]:
            os.kill(process, signal.SIGKILL)
        until(lambda: not nodes[0].is_alive(), nodes[:1], log)
    finally:
        for one in nodes:
            one.kill()
            one.join()
    out = log.read_text()
    assert nodes[0].exitcode == 0, out
    first = json.loads((folder / "launch.json").read_text())
    (again,) = (json.loads(path.read_text()) for path in folder.glob("launch-0*.json"))
    assert (first["world_size"], again["world_size"]) == (2, 1), out
    for launch in (first, again):  # planned and tried for the ranks of its own start
        assert launch["plan"]["world"] == launch["world_size"]
        assert [attempt["outcome"] for attempt in launch["attempts"]] == ["ok"]
        assert launch["config"]["train"]["tokens_per_step"] == 384
    assert 2 <= again["first_step"] < STEPS and "resumed at step" in out
    rows = records(folder)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["tokens"] == 384 and not row["skipped"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
