"""Command `megacpp`: every subcommand answers, in text and JSON, and mistakes are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacpp.cli.main import COMMANDS, main
from megacpp.config.checks.every import RULES
from megacpp.config.schema import Config
from megacpp.config.settings import settings_of
from megacpp.versions import TESTED_PYTHON, TESTED_TORCH

ROOT = Path(__file__).parents[1]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        code, out, _ = run(capsys, *words)
        assert code == 0 and all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_help_answers_within_a_second_of_cpu(name: str) -> None:
    """CPU time, so that a busy machine doesn't fail it; `train.py --help` too."""
    command = ["-m", "megacpp", *name.split(), "--help"] if name else ["train.py", "--help"]
    code = (
        "import resource, subprocess, sys; "
        f"done = subprocess.run([sys.executable, *{command!r}], capture_output=True, text=True); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "assert done.returncode == 0, done.stderr; assert len(done.stdout) > 80; "
        "print(used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0


def test_unknown_commands_suggest(capsys: pytest.CaptureFixture[str]) -> None:
    for words, near in ((["preset"], "presets"), (["data", "prepar"], "data prepare")):
        code, _, err = run(capsys, *words)
        assert code == 2 and err.startswith("error: ") and near in err and err.count("\n") == 1


def test_the_first_word_of_two_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["data"], ["data", "--help"], ["data", "-h"], ["help", "data"]):
        code, out, _ = run(capsys, *words)
        names = [line.split("  ")[1] for line in out.splitlines()]
        assert code == 0 and names == ["data prepare", "data inspect"]


def test_presets_count_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "presets", "--json")
    rows = {row["preset"]: row for row in json.loads(out)}
    assert code == 0 and set(rows) >= {"tiny", "nam56r", "nam52_deep", "hybrid_400m"}
    assert all(row["total"] >= row["active"] > 0 for row in rows.values())
    code, out, _ = run(capsys, "presets")
    assert code == 0 and all(name in out for name in rows)


def test_counting_the_largest_preset_takes_seconds_not_memory() -> None:
    began = time.process_time()
    from megacpp.config.presets import nam56r_base
    from megacpp.model.count import count_parameters

    assert count_parameters(nam56r_base().model).total > 4e9
    assert time.process_time() - began < 5


def test_show_says_both_readings_of_nam56r(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "nam56r_base")
    assert code == 0 and "(published: 4.73B and 3.03B active; +0.13% and +0.35%)" in out
    assert "model.depth = 52  (preset)" in out
    code, out, _ = run(capsys, "show", "tiny", "--optim.lr", "1e-3", "--json")
    content = json.loads(out)
    assert content["provenance"]["optim.lr"] == "command line"
    assert content["config"]["optim"]["lr"] == 1e-3


def test_validate_lists_every_broken_rule(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "validate", "tiny")
    assert code == 0 and out.splitlines()[0] == "ok" and "model.dim" not in out
    said = " ".join(out.split())
    assert f"ok tiny on 1 rank(s): {len(settings_of(Config))} settings, " in said
    assert f"{len(RULES)} groups of rules" in said
    code, out, _ = run(capsys, "validate", "tiny", "--all", "--world", "4", "--mesh.tp", "2")
    assert code == 0 and "mesh.tp = 2  (command line)" in out and "(dp_shard 2 x tp 2)" in out
    content = json.loads(run(capsys, "validate", "tiny", "--json")[1])
    assert content["ok"] and content["rules"] == list(RULES) and "config" not in content
    content = json.loads(run(capsys, "validate", "tiny", "--json", "--all")[1])
    assert content["config"]["model"]["dim"] == 192 and content["provenance"]
    wrong = ["validate", "tiny", "--mesh.tp", "4", "--optim.beta1", "1", "--world", "4"]
    code, out, _ = run(capsys, *wrong)
    assert code == 2 and out.count("error: ") == 2 and "mesh.tp=4" in out
    code, out, _ = run(capsys, *wrong, "--json")
    assert code == 2 and len(json.loads(out)["errors"]) == 2
    code, out, _ = run(capsys, "validate", "tiny", "--data", "--data.path", "/nowhere")
    assert code == 3 and "/nowhere" in out
    code, _, err = run(capsys, "validate", "tiny", "--world", "two")
    assert code == 2 and "whole number" in err


def test_validate_reads_what_train_reads(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--fit", "auto"], ["--gradient-checkpointing"], ["--recompute-norms", "false"]):
        code, out, _ = run(capsys, "validate", "tiny", *words)
        assert code == 0, out
    code, out, _ = run(capsys, "validate", "tiny", "--fit", "soon")
    assert code == 2 and out.startswith("error: memory.fit=soon: ")


def test_a_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "tiny")
    lines = out.split("\n\n", 1)[1].splitlines()
    assert all(" = " in line and line.endswith(")") for line in lines)
    assert "run.sample_prompt = ''  (default)" in lines


def test_doctor_reports_and_two_ranks_meet() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megacpp", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    findings = {f["name"]: f for f in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert findings["gloo self-test"]["ok"] is True
    assert findings["torch"]["ok"] is True
    assert all(version in findings["torch"]["detail"] for version in TESTED_TORCH)
    assert all(version in findings["python"]["detail"] for version in TESTED_PYTHON)
    assert "requires" in findings["triton"]["detail"]
    for name in ("mamba_ssm", "tilelang", "torchao", "transformer_engine"):
        assert findings[name]["ok"] in (True, None) and findings[name]["detail"]


def test_data_commands_refuse_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out_dir = str(tmp_path / "out")
    for words, code in (
        (["data", "prepare", "--vocab-size", "10"], 2),
        (["data", "prepare", "/nowhere", "--out", out_dir], 3),
        (["data", "prepare", "--vocabsize", "10"], 2),
        (["data", "prepare", str(ROOT), "--globs", "*.nothing", "*.none", "--out", out_dir], 3),
        (["data", "inspect", "/nowhere"], 3),
        (["data", "inspect", "--split", "test"], 2),
    ):
        got, out, err = run(capsys, *words)
        assert got == code, (words, out, err)
        assert err.startswith("error: ") and "Fix: " in err and err.count("\n") == 1


def test_seeing_a_mesh_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Use one process for any ranks: tests/parallel/test_dry_run.py and test_explain.py."""
    small = ["--model.depth", "1", "--data.seq-len", "16", "--world", "4", "--mesh.tp", "2"]
    for name in ("dry-run", "explain"):
        code, out, err = run(capsys, name, "tiny", *small)
        assert code == 0 and "error" not in err  # a line of progress on a slow machine
        assert ": equal" in " ".join(out.split()) and "all_gather" in out
        code, out, err = run(capsys, name, "nam56r_base", "--world", "7")
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    command = [sys.executable, "-m", "megacpp", "presets"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: output=: no space left on device. Fix: ")
    assert done.stderr.count("\n") == 1
