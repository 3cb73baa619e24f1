"""docs/whole-way.sh as it stands: real processes, a pipeline of transformers, lm-eval's command."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.tasks import TASKS, printed_alike, write_tasks
from tests.test_run import records

ROOT = Path(__file__).parents[2]
ASKED = ("lines", "cloze")
for name in ("transformers", "lm_eval"):
    pytest.importorskip(name)


@pytest.fixture(scope="module")
def way(headers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the script has run."""
    home = tmp_path_factory.mktemp("way")
    write_tasks(home / "tasks", ASKED)
    files = ",".join(str(home / "tasks" / f"{name}.yaml") for name in ASKED)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "docs/whole-way.sh"), str(headers), files]
    done = subprocess.run(
        command, cwd=home, env={**os.environ, **path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return home


def test_a_killed_run_goes_on(way: Path) -> None:
    said = (way / "resumed.txt").read_text()
    found = re.search(r"resumed at step (\d+) of 150", said)
    assert found and 20 <= int(found[1]) < 150 and f"step {int(found[1]):3}/150" not in said
    rows = records(way / "run")
    assert [row["step"] for row in rows] == list(range(150))
    first, last = (sum(row["loss"] for row in part) for part in (rows[:20], rows[-20:]))
    assert last < 0.8 * first


def test_transformers_writes_what_sample_writes(way: Path) -> None:
    sampled = json.loads((way / "sampled.json").read_text())
    assert (way / "written.txt").read_text() == f"#include{sampled['text']}\n"
    assert sampled["tokens"] == 100 and len(set(sampled["text"])) > 8


def test_lm_eval_finds_the_same_figures(way: Path) -> None:
    """Accuracies to the last digit that lm-eval prints, in the exported folder.

    The perplexity of words that a tiny model doesn't expect is about 20,000. Programs that round in
    fp32 find 20428.6910 and 20428.6965: it is compared to less than one of the sixth digit, the
    last one that `eval` prints.
    """
    found = json.loads((way / "run" / "eval" / "final.json").read_text())["results"]
    printed = [line.split() for line in (way / "ours.txt").read_text().splitlines()[2:-1]]
    (report,) = (way / "theirs").rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    for task, documents, metric, value in printed:
        theirs = results[task][f"{metric},none"]
        ours = found[task][metric]
        if metric == "perplexity":
            unit = 10.0 ** (math.floor(math.log10(theirs)) - 5)
            assert abs(ours - theirs) < unit, (task, ours, theirs)
        else:
            assert printed_alike(ours, theirs), (task, metric, ours, theirs)
        assert value == f"{ours:.6g}"
        assert int(documents) == len(TASKS[task][1])
    assert [row[::2] for row in printed] == [
        *(["lines", metric] for metric in ("acc", "acc_norm")),
        *(["cloze", metric] for metric in ("perplexity", "acc")),
    ]
    assert 0 < results["lines"]["acc,none"] < 1
