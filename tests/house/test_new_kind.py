"""New block kind, added as CONTRIBUTING says: a folder, and a line in two files.

A copy of the repository gets `low_rank/` beside this file as a kind Z. Its plan, activations and
estimate are printed without another change, and tp equals one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EDITS = (
    (
        "megacpp/blocks/kinds.py",
        "from megacpp.blocks.m2rnn.",
        "from megacpp.blocks.low_rank.descriptor import LOW_RANK\nfrom megacpp.blocks.m2rnn.",
    ),
    ("megacpp/blocks/kinds.py", ", DENSE)", ", DENSE, LOW_RANK)"),
    (
        "megacpp/config/model.py",
        "from megacpp.blocks.m2rnn.",
        "from megacpp.blocks.low_rank.config import LowRankConfig\nfrom megacpp.blocks.m2rnn.",
    ),
    (
        "megacpp/config/model.py",
        "    moe: MoEConfig",
        "    low_rank: LowRankConfig = field(default_factory=LowRankConfig)\n    moe: MoEConfig",
    ),
)
MODEL = ["tiny", "--model.pattern", "AZ", "--model.depth", "4", "--model.low_rank.rank", "16"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the code that has the kind."""
    to = tmp_path_factory.mktemp("copy")
    plain = shutil.ignore_patterns("__pycache__")
    for room in ("megacpp", "parallel", "optim", "checkpointing"):
        shutil.copytree(ROOT / room, to / room, ignore=plain)
    shutil.copy(ROOT / "train.py", to)
    shutil.copytree(
        Path(__file__).parent / "low_rank", to / "megacpp/blocks/low_rank", ignore=plain
    )
    for name, old, new in EDITS:
        text = (to / name).read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
        (to / name).write_text(text.replace(old, new))
    return to


def ran(copy: Path, *words: str) -> str:
    """Return what a command of the copy prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_plan_and_bytes_are_known(copy: Path) -> None:
    rows = json.loads(ran(copy, "-m", "megacpp", "explain", *MODEL, "--plan", "--json"))
    assert {row["name"]: row["layout"] for row in rows if row["kind"] == "Z"} == {
        "down.weight": "[L_tp, D]",
        "up.weight": "[D, L_tp]",
        "": "y[B, T, D]{tp} -> y[B, T_tp, D]",
    }
    kept = ran(copy, "-m", "megacpp", "activations", *MODEL, "--data.seq_len", "64")
    assert "Z  low-rank feed-forward" in kept and "gelu" in kept
    wrong = subprocess.run(
        [sys.executable, "-m", "megacpp", "validate", *MODEL, "--model.low_rank.rank", "0"],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2 and "model.low_rank.rank=0" in wrong.stdout


def test_it_trains_the_same_on_two_ranks(copy: Path, corpus: Path, tmp_path: Path) -> None:
    settings = [*MODEL, "--precision.dtype", "fp64", "--data.path", str(corpus)]
    settings += ["--data.seq_len", "64", "--run.steps", "3", "--train.tokens-per-step", "512"]
    settings += ["--checkpoint.every", "0", "--run.eval-every", "0"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    losses = []
    for name, start, mesh in (("one", ["train.py"], []), ("two", ranks, ["--mesh.tp", "2"])):
        ran(copy, *start, *settings, *mesh, "--run.dir", str(tmp_path / name))
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows if "grad_norm" in row])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-12, abs=0)
