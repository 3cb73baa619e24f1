"""Steps without a label: left out, and no fault of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from tests.launch import Done, forked
from tests.test_run import ADAMW, SMALL, records

LONG = "and no more " * 60  # a prompt of many rows, in which no label counts


@pytest.fixture(scope="module")
def home(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus of long prompts and short answers."""
    home = tmp_path_factory.mktemp("talks")
    rows = [{"prompt": f"What is {n}? {LONG}", "completion": f"It is {n}."} for n in range(40)]
    (home / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = CorpusSpec(str(home / "talks.jsonl"), tokenizer=str(corpus), validation_fraction=0.1)
    ensure_corpus(spec, home / "talks")
    return home


def start(home: Path, name: str, *flags: str) -> Done:
    paths = ["--data.path", str(home / "talks"), "--run.dir", str(home / name)]
    batch = ["--train.device-batch-size", "1", "--run.eval-rows", "1", "--run.sample-tokens", "8"]
    return forked("tiny", *SMALL, *ADAMW, *paths, *batch, *flags)


@pytest.fixture(scope="module")
def labels(home: Path) -> list[int]:
    """Return the labels of 16 steps of one row."""
    done = start(home, "straight", "--run.steps", "16", "--train.max-skips", "16")
    assert done.returncode == 0, done.stderr
    return [record["valid_tokens"] for record in records(home / "straight")]


def test_a_run_may_end_on_a_step_without_a_label(home: Path, labels: list[int]) -> None:
    last = next(n for n, count in enumerate(labels) if not count and any(labels[:n]))
    done = start(home, "ends", "--run.steps", str(last + 1), "--checkpoint.every", "1")
    assert done.returncode == 0, done.stderr
    assert f"step {last + 1}: left out: no label counts\n" in done.stdout
    assert records(home / "ends")[last]["bits_per_byte"] is None
    assert (home / "ends/final").is_dir()
    assert (home / "ends/checkpoints" / f"step-{last + 1:06}").is_dir()


def test_steps_without_a_label_in_a_row_end_a_run(home: Path, labels: list[int]) -> None:
    """Data is at fault, not the learning rate."""
    first = next(n for n in range(16) if not any(labels[n : n + 2]))
    done = start(home, "none", "--run.steps", "16", "--train.max-skips", "2")
    assert done.returncode == 3
    assert "no label of 2 steps in a row counts" in done.stderr and "optim.lr" not in done.stderr
    assert len(records(home / "none")) == first + 2


def test_held_out_rows_without_a_label_have_no_loss(home: Path, labels: list[int]) -> None:
    text = (home / "straight/evaluations.jsonl").read_text().splitlines()
    last = json.loads(text[-1])
    assert last["loss"] is None and last["bits_per_byte"] is None
    assert (home / "straight/final").is_dir()
    assert main(["report", str(home / "straight")]) == 0
    assert (
        main(["export", str(home / "straight"), "--out", str(home / "hf"), "--to", "hf-code"]) == 0
    )
