"""Runs on conversations mixed with texts: every mesh, kill and resume, a sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megacpp.data.prepare import CorpusSpec, ensure_corpus
from tests.data.test_conversations import question
from tests.launch import Done, forked
from tests.test_run import ADAMW, SMALL, records

STEPS = ["--run.steps", "4", "--checkpoint.every", "2", "--run.sample-tokens", "8"]


@pytest.fixture(scope="module")
def home(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts and conversations of one tokenizer."""
    home = tmp_path_factory.mktemp("talks")
    shutil.copytree(corpus, home / "corpus")
    (home / "talks.jsonl").write_text("\n".join(json.dumps(question(n)) for n in range(80)))
    spec = CorpusSpec(str(home / "talks.jsonl"), tokenizer=str(corpus), validation_fraction=0.1)
    ensure_corpus(spec, home / "talks")
    return home


def start(home: Path, name: str, *flags: str, ranks: int = 1) -> Done:
    paths = ["--data.path", str(home / "corpus"), "--run.dir", str(home / name)]
    batch = ["--train.device-batch-size", str(4 // min(ranks, 4)), "--train.tokens-per-step", "384"]
    mix = ["--data.mix", "talks=2,corpus=1"]
    return forked("tiny", *SMALL, *ADAMW, *STEPS, *paths, *batch, *mix, *flags, ranks=ranks)


@pytest.fixture(scope="module")
def straight(home: Path) -> Path:
    done = start(home, "straight")
    assert done.returncode == 0, done.stderr
    assert "of the tokens learned" in " ".join(done.stdout.split())
    return home / "straight"


def same(one: Path, other: Path, limit: float) -> None:
    pairs = list(zip(records(one), records(other), strict=True))
    assert len(pairs) == 4
    for a, b in pairs:
        assert a["valid_tokens"] == b["valid_tokens"] < a["tokens"]
        for key in ("loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=limit or 0, abs=0), (key, a["step"])
        assert a["loss_by_source"] == pytest.approx(b["loss_by_source"], rel=limit or 0, abs=0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--mesh.cp", "2", "--mesh.dp-shard", "1"],
        ["--mesh.pp", "2", "--train.device-batch-size", "2", "--train.num-chunks", "2"],
        ["--mesh.tp", "2", "--model.attention.num-kv-heads", "2"],
        [],
    ],
)
def test_any_mesh_is_the_same_run(home: Path, straight: Path, flags: list[str]) -> None:
    name = "-".join(["mesh", *flags]).replace(".", "")
    alone = straight
    if "--mesh.tp" in flags:
        alone = home / "two-kv-heads"
        assert start(home, alone.name, *flags[2:]).returncode == 0
    done = start(home, name, *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    same(alone, home / name, 1e-12)


def test_a_killed_run_goes_on(home: Path, straight: Path) -> None:
    shutil.copytree(straight, home / "killed")
    shutil.rmtree(home / "killed/checkpoints/step-000004")
    shutil.rmtree(home / "killed/final")
    (home / "killed/checkpoints/latest").write_text("step-000002")
    done = start(home, "killed")
    assert done.returncode == 0, done.stderr
    same(straight, home / "killed", 0.0)


def test_the_sample_answers_a_held_out_question(home: Path, straight: Path) -> None:
    text = next((straight / "samples").iterdir()).read_text()
    prompt = json.loads((home / "talks/index.json").read_text())["sample_prompt"]
    assert text.startswith(prompt + "\n") and prompt.startswith("What is ")
    config = json.loads((straight / "final/tokenizer_config.json").read_text())
    assert "assistant" in config["chat_template"]
