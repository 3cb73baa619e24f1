"""The Slurm recipe on a controller that answers here, with two free nodes; skipped elsewhere.

Two `slurmd` of one machine are enough: NodeName=n[1-2] NodeHostname=HOST Port=[17001-17002].
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch import ROOT, forked
from tests.run.test_cluster import TINY, free_port

STEPS, LIMIT_S = 900, 300


def asked(*words: str) -> str:
    """Return what a command of Slurm prints; empty if it fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def reach(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end, "the job doesn't go on"
        time.sleep(0.2)


@pytest.mark.slow
def test_a_job_goes_on_after_each_loss(corpus: Path, tmp_path: Path) -> None:
    """A rank, a launcher, then the nodes are lost; weights equal those of an undisturbed run."""
    if asked("sinfo", "-h", "-t", "idle", "-o", "%D").strip() not in ("2", "3", "4"):
        pytest.skip("no Slurm controller with idle nodes answers here")
    run, script = tmp_path / "run", tmp_path / "job.sbatch"
    flags = ["tiny", *TINY, "--data.path", str(corpus), "--run.steps", str(STEPS)]
    flags += ["--checkpoint.every", "50"]
    straight = forked(*flags, "--run.dir", str(tmp_path / "straight"), ranks=2)
    assert straight.returncode == 0, straight.stderr
    text = (ROOT / "docs/launch/slurm.sbatch").read_text()
    script.write_text(re.sub(r"#SBATCH --(gpus-per-node|exclusive).*\n", "", text))
    env = {**os.environ, "NPROC": "1", "RDZV_HOST": "127.0.0.1", "PORT": str(free_port())}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = subprocess.run(
        ["sbatch", "--parsable", script, *flags, "--run.dir", str(run)],
        **{"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "check": True},
    ).stdout.strip()
    attacks = (f"train.py.*{run}", f"bin/megacpp train.*{run}", "")
    try:
        for number, attacked in enumerate(attacks, 1):
            reach(lambda at=200 * number: rows(run) >= at)
            if attacked:
                os.kill(int(asked("pgrep", "-f", attacked).split()[-1]), signal.SIGKILL)
            else:
                asked("scontrol", "requeue", job)
            restarts = f"Restarts={number}"
            reach(lambda word=restarts: word in asked("scontrol", "show", "job", job))
            reach(lambda: "JobState=PENDING" in asked("scontrol", "show", "job", job))
            asked("scontrol", "update", f"JobId={job}", "StartTime=now")
        reach(lambda: "JobState=COMPLETED" in asked("scontrol", "show", "job", job))
    finally:
        asked("scancel", job)
    weights = [
        (folder / "final/model.safetensors").read_bytes() for folder in (tmp_path / "straight", run)
    ]
    assert weights[0] == weights[1], next(tmp_path.glob("megacpp-*.log")).read_text()


def rows(run: Path) -> int:
    """Return the steps that are recorded."""
    record = run / "metrics.jsonl"
    return len(record.read_text().splitlines()) if record.exists() else 0
