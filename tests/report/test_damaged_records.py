"""Damaged records of a run: named with file and line, in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megacpp.cli.main import main
from tests.report.test_page import folder as folder

DAMAGE = [
    ("launch.json", lambda text: text[: len(text) // 2], r"launch\.json line \d+: "),
    ("launch.json", lambda text: "[]", r"launch\.json line 1: is not an object"),
    ("launch.json", lambda text: '{"mesh": 3}', r"launch\.json line 1: mesh is not an object"),
    ("launch.json", lambda text: '{"first_step": "0"}', r"line 1: first_step is '0'"),
    ("metrics.jsonl", lambda text: "garbage\n" + text, r"metrics\.jsonl line 1: is not JSON"),
    ("metrics.jsonl", lambda text: text + "\n[1]\n", r"metrics\.jsonl line 31: is not JSON"),
    ("metrics.jsonl", lambda text: '{"loss": 1.0}\n', r"line 1: is not an object with a step"),
    ("metrics.jsonl", lambda text: '{"step": 0, "loss": "low"}\n', r'line 1: loss is "low"'),
    ("metrics.jsonl", lambda text: '{"step": 0, "tokens": 1.5}\n', "line 1: tokens is 1.5"),
    ("metrics.jsonl", lambda text: '{"step": true}\n', "line 1: step is true"),
    ("metrics.jsonl", lambda text: '{"step": -1}\n', "line 1: step is -1"),
    ("metrics.jsonl", lambda text: '{"step": 0, "lr_groups": {"a": "b"}}\n', "lr_groups is"),
    ("metrics.jsonl", lambda text: "\udcff\n", "metrics.jsonl line 1: is not text"),
    ("evaluations.jsonl", lambda text: '{"step": 1, "loss": []}\n', r"evaluations\.jsonl line 1"),
    ("memory/summary.json", lambda text: "{", r"summary\.json line 1"),
]


@pytest.mark.parametrize(
    ("name", "change", "said"), DAMAGE, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(DAMAGE)]
)
def test_a_damaged_record_is_named_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, change: Any, said: str
) -> None:
    path = folder / name
    text = path.read_text() if path.exists() else ""
    path.write_bytes(change(text).encode(errors="surrogateescape"))
    assert main(["report", str(folder)]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: run=") and err.count("\n") == 1
    assert re.search(said, err) and "Fix: " in err
    assert not (folder / "report.html").exists()


def test_a_record_of_another_shape_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "launch.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attempts": 7}))
    assert main(["report", str(folder)]) == 3
    assert "records don't fit together (TypeError" in capsys.readouterr().err


def test_a_damaged_configuration_of_a_sampled_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints/step-000001").mkdir(parents=True)
    (tmp_path / "config.json").write_text("{\n")
    assert main(["sample", str(tmp_path), "--checkpoint", "1"]) == 3
    assert f"error: run={tmp_path}: config.json line 2: " in capsys.readouterr().err
