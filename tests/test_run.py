"""Whole runs in real processes: train, record, evaluate, save, resume, sample, on 1 and 2 ranks.

Everything happens on a small corpus of real C++ headers and a model with every letter. One run on
one rank and one on two are started as a person would; those that are compared with them are forked
(tests/launch.py).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp.launch.record import all_versions
from megacpp.launch.schema import SCHEMA
from megacpp.lessons.launch import ADAMW, SMALL
from megacpp.report.files import read_launch
from tests.differences import largest
from tests.figures import Record
from tests.launch import ROOT, Done, forked, started

KEYS = {
    "step", "loss", "bits_per_byte", "grad_norm", "lr", "tokens", "valid_tokens",
    "tokens_per_s", "step_s", "peak_bytes", "grad_accum", "nonfinite", "skipped",
}  # fmt: skip


def train(
    corpus: Path, folder: Path, ranks: int, *flags: str, run: Callable[..., Done] = forked
) -> Done:
    """Run `SMALL` to its end."""
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    batch = ["--train.device-batch-size", str(4 // ranks)]
    done = run("tiny", *SMALL, *paths, *batch, *flags, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(a: list[dict], b: list[dict], limit: float) -> None:
    assert [r["step"] for r in a] == [r["step"] for r in b] == list(range(20))
    for key in ("loss", "grad_norm", "bits_per_byte", "lr"):
        for one, two in zip(a, b, strict=True):
            assert abs(one[key] - two[key]) <= limit * abs(one[key]), (key, one["step"])


@pytest.fixture(scope="module")
def single(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Twenty AdamW steps in fp64 on one process without a process group."""
    folder = tmp_path_factory.mktemp("single") / "run"
    done = train(corpus, folder, 1, *ADAMW, run=started)
    return folder, done.stdout


@pytest.fixture(scope="module")
def double(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run on two FSDP2 ranks over gloo."""
    folder = tmp_path_factory.mktemp("double") / "run"
    train(corpus, folder, 2, *ADAMW, run=started)
    return folder


def test_the_screen_says_what_runs(single: tuple[Path, str]) -> None:
    out, flat = single[1], " ".join(single[1].split())  # flat: where a screen's edge wraps lines
    for words in (
        "parameters,", "attention", "Mamba-3", "one process, no process group", "tokens a step",
        "adamw", "corpus ", "fresh start, 20 steps", "step  1/20", "step 20/20", "eta ",
        "bits per byte", "---- sample ----", "backward runs again", "ablock=selective would free",
        "  no verdict: 6 held-out documents are too few, 64 are needed\n  gzip -9 ",
        ", each document compressed alone\n  xz -9 ", ", all documents as one stream\n",
        "rows and hidden units of experts", "keeps all, its backward comes at once",
    ):  # fmt: skip
        assert words in out or words in flat, words


def test_metrics_have_every_key_in_full_precision(single: tuple[Path, str]) -> None:
    rows = records(single[0])
    assert len(rows) == 20
    for row in rows:
        assert row.keys() >= KEYS and not row["skipped"]
        assert row["tokens"] == 4 * 48 and 0 < row["valid_tokens"] <= row["tokens"]
        assert row["peak_bytes"] > 1 << 20 and row["tokens_per_s"] > 0
    assert len(repr(rows[0]["loss"])) > 12
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.05


def test_speed_is_of_all_ranks_and_memory_of_the_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacpp.launch.start.device_peak_flops", lambda device: 1e12)
    folder, learned = tmp_path / "run", str(tmp_path / "learned")
    train(corpus, folder, 2, *ADAMW, "--run.steps", "2", "--memory.calibration", learned)
    flops = json.loads((folder / "launch.json").read_text())["flops_per_token"]
    for row in records(folder):
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / 2e12, rel=1e-12)
    measured = json.loads((folder / "memory/measured.json").read_text())
    assert measured["components"]["activations"]["measured"] > 0, "its forward was followed"


def test_memory_is_measured_in_the_first_full_batch(corpus: Path, tmp_path: Path) -> None:
    """A step of a batch warmup has fewer microbatches; step 2, due for a snapshot, is one."""
    folder, learned = tmp_path / "run", str(tmp_path / "learned")
    flags = "--train.device-batch-size 1 --train.grad-accum 4 --train.batch-warmup-steps 3"
    steps = [*ADAMW, *flags.split(), "--run.steps", "5", "--memory.snapshot-every", "2"]
    train(corpus, folder, 1, *steps, "--memory.calibration", learned)
    measured = json.loads((folder / "memory/measured.json").read_text())
    full = [row["step"] for row in records(folder) if row["grad_accum"] == 4]
    assert measured["step"] == full[0] + 1 == 4


def test_the_run_folder_is_complete(single: tuple[Path, str], corpus: Path) -> None:
    folder = single[0]
    config = json.loads((folder / "config.json").read_text())
    assert config["provenance"]["model.dim"] == "command line"
    assert config["provenance"]["optim.beta2"] == "default"
    assert config["provenance"]["model.attention.qk_norm"] == "preset"
    assert config["provenance"]["train.grad_accum"] == "derived"
    launch = json.loads((folder / "launch.json").read_text())
    *layers, last = launch["recompute"]
    assert {layer["kind"] for layer in layers} == set("AEMR") and last["runs_again"] == []
    experts = next(layer for layer in layers if layer["kind"] == "E")
    assert "rows and hidden units of experts" in experts["runs_again"]
    assert launch["versions"] == all_versions() and launch["world_size"] == 1
    assert launch["parameters"]["total"] > launch["parameters"]["active"] > 0
    assert launch["schema"] == SCHEMA and read_launch(folder / "launch.json") == launch
    assert {"git_commit", "mesh", "flops_per_token", "data_fingerprint"} <= launch.keys()
    assert list((folder / "tensorboard").iterdir())
    prompt = json.loads((corpus / "index.json").read_text())["sample_prompt"]
    assert prompt and (folder / "samples/step-000020.txt").read_text().startswith(prompt)
    assert {p.name for p in (folder / "checkpoints").iterdir()} >= {"step-000010", "step-000020"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "final" / name).read_bytes() == (corpus / name).read_bytes()
    result = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])
    assert result["gzip_bits_per_byte"] > 0 and result["bits_per_byte"] > 0
    assert result["no_verdict"] and f"  no verdict: {result['no_verdict']}\n" in single[1]


def test_two_ranks_are_the_same_run(
    single: tuple[Path, str], double: Path, record_property: Record
) -> None:
    assert_same_run(records(single[0]), records(double), limit=1e-12)
    one, two = ((f / "evaluations.jsonl").read_text() for f in (single[0], double))
    assert json.loads(one)["target_bytes"] == json.loads(two)["target_bytes"]
    assert json.loads(one)["loss"] == pytest.approx(json.loads(two)["loss"], rel=1e-12)
    one_rank, two_ranks = ([r["loss"] for r in records(f)] for f in (single[0], double))
    apart = largest(abs(a / b - 1) for a, b in zip(one_rank, two_ranks, strict=True))
    record_property("largest relative difference of a loss, two ranks against one", apart)


def test_resume_is_bit_exact_on_the_same_mesh(
    corpus: Path, double: Path, tmp_path: Path, record_property: Record
) -> None:
    """20 steps against 10, a new process, and 10 more: a difference of exactly 0."""
    folder = half_way(double, tmp_path)
    train(corpus, folder, 2, *ADAMW)
    assert_same_run(records(double), records(folder), limit=0.0)
    name = "final/model.safetensors"
    assert (folder / name).read_bytes() == (double / name).read_bytes()
    record_property("steps equal bit for bit in a second run", 20)


def test_resume_on_another_world_size(
    corpus: Path, single: tuple[Path, str], double: Path, tmp_path: Path
) -> None:
    folder = half_way(double, tmp_path)
    done = train(corpus, folder, 1, *ADAMW)
    assert "resumed at step 10 of 20" in done.stdout
    assert_same_run(records(single[0]), records(folder), limit=1e-12)


def half_way(run: Path, tmp_path: Path) -> Path:
    """Return a copy of a run that stopped right after step 10 was saved (its records go on)."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints/step-000020")
    shutil.rmtree(folder / "final")
    (folder / "checkpoints/latest").write_text("step-000010")
    return folder


def test_muon_in_fp32_on_one_and_two_ranks(corpus: Path, tmp_path: Path) -> None:
    """Momentum in fp32 too: in bf16 one that lies between two numbers may go to either."""
    wide = ["--optim.muon-momentum-dtype", "fp32"]
    train(corpus, tmp_path / "one", 1, *wide)
    train(corpus, tmp_path / "two", 2, *wide)
    assert_same_run(records(tmp_path / "one"), records(tmp_path / "two"), limit=1e-5)


def test_sampling_from_the_run_folder(single: tuple[Path, str]) -> None:
    command = ["sample", str(single[0]), "--prompt", "#include <", "--max-tokens", "6", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "megacpp", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt"] == "#include <" and 0 < answer["tokens"] <= 6


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--data.path", "nowhere"], 3, "nowhere"),
        (["--model.vocab-size", "300"], 2, "model.vocab_size=300"),
        (["--checkpoint.resume", "nowhere"], 2, "checkpoint.resume=nowhere"),
        (["--model.dim", "64"], 4, "model.dim=64"),
        (["--run.seed", "7"], 4, "run.seed=7"),
    ],
)
def test_wrong_data_or_checkpoint_is_one_line(
    corpus: Path, single: tuple[Path, str], flags: list[str], code: int, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(single[0], folder)
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "run.lock"]
    before = {p: p.read_bytes() for p in files}
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    batch = ["--train.device-batch-size", "4"]
    done = forked("tiny", *SMALL, *paths, *ADAMW, *batch, *flags)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and words in lines[0] and "Fix: " in lines[0]
    now = [p for p in folder.rglob("*") if p.is_file() and p.name != "run.lock"]
    assert {p: p.read_bytes() for p in now} == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_corpus_does_not_train(ranks: int, corpus: Path, tmp_path: Path) -> None:
    """Two inverted bytes of 200,000, of the right size and inside the vocabulary."""
    damaged = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    shard = damaged / "train-00000.bin"
    raw = bytearray(shard.read_bytes())
    for at in (1000, len(raw) // 2):
        raw[at & ~1] ^= 0xFF  # low bytes: 400 ids have one bit in the high one
    shard.write_bytes(raw)
    paths = ["--data.path", str(damaged), "--run.dir", str(tmp_path / "run")]
    done = forked("tiny", *SMALL, *paths, "--train.device-batch-size", "2", ranks=ranks)
    assert done.returncode == 3, done.stderr
    lines = done.stderr.strip().splitlines()
    found = r"train-00000\.bin block \d \(bytes [\d,]+ to [\d,]+, documents \d+ to \d+ of train\): "
    for line in lines:
        assert re.search(found + r"its CRC-32 differs .* Fix: run `megacpp data prepare ", line)
    assert 1 <= len(lines) <= ranks and f"--out {damaged} --force`" in lines[0]


def test_a_finished_run_refuses_fewer_steps_and_says_when_nothing_is_left(
    corpus: Path, single: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(single[0], folder)
    out = train(corpus, folder, 1, *ADAMW, "--optim.lr", "1e-3").stdout
    assert "nothing is left to train" in out
    assert "optim.lr changed from 0.003 to 0.001 on resume" in out
    assert len((folder / "evaluations.jsonl").read_text().splitlines()) == 1
    assert (folder / "launch-000020.json").exists() and (folder / "launch.json").exists()
    paths = ["--data.path", str(corpus), "--run.dir", str(folder)]
    fewer = "--train.device-batch-size 4 --run.steps 5 --optim.warmup-steps 0".split()
    done = forked("tiny", *SMALL, *paths, *ADAMW, *fewer)
    assert done.returncode == 2 and "run.steps=5" in done.stderr


def test_starting_over_moves_the_earlier_run_aside(
    corpus: Path, single: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(single[0], folder)
    flags = ["--checkpoint.resume", "never", "--run.steps", "4", "--run.eval-every", "2"]
    done = train(corpus, folder, 2, *ADAMW, *flags)
    assert done.stdout.count("validation: loss ") == 2
    assert [r["step"] for r in records(folder)] == [0, 1, 2, 3]
    evaluations = (folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(e)["step"] for e in evaluations] == [1, 3]
    assert len(records(tmp_path / "run.old-1")) == 20


def test_non_finite_steps_are_skipped_then_end_the_run(corpus: Path, tmp_path: Path) -> None:
    """Weights that overflow: no step moves them, ten in a row end with exit code 5."""
    paths = ["--data.path", str(corpus), "--run.dir", str(tmp_path / "run")]
    flags = "--train.device-batch-size 4 --model.init-std 1e30".split()
    done = forked("tiny", *SMALL, *paths, *flags)
    assert done.returncode == 5, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and "train.max_skips=10" in lines[0]
    rows = records(tmp_path / "run")
    assert len(rows) == 10 and all(row["skipped"] and row["nonfinite"] > 0 for row in rows)
    assert "SKIPPED" in done.stdout and "gradient values are not finite (rank 0: " in done.stdout
