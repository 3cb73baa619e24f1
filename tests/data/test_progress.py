"""Progress of `megacpp data prepare`: bars with the remaining time on a terminal, else lines."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.terminal import progress
from tests.data.conftest import make_document

ROOT = Path(__file__).parents[2]
STAGES = ("reading", "learning the tokenizer", "encoding", "xz -9 of held-out documents")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": make_document(n)}) + "\n" for n in range(80)))
    return path


def test_a_terminal_shows_every_stage_to_its_end(texts: Path, tmp_path: Path) -> None:
    """The real command at a pseudo-terminal of 100 columns."""
    ours, its = pty.openpty()
    words = ["data", "prepare", str(texts), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    child = subprocess.Popen(
        [sys.executable, "-m", "megacpp", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=its,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"},
    )  # fmt: skip
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is closed at the other end
        while piece := os.read(ours, 1 << 16):
            shown += piece
    os.close(ours)
    printed, _ = child.communicate()
    assert child.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n").splitlines()
    for stage in STAGES:
        last = [line for line in lines if line.lstrip().startswith(stage)][-1]
        assert re.search(r"━{32}\s+100%\s+0:00:0\d", last), last
    assert str(tmp_path / "out") in printed.decode() and "100%" not in printed.decode()


def test_without_a_terminal_lines_have_share_and_time(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clock that goes on by one second with each look: a line every five documents."""
    clock = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    ensure_corpus(CorpusSpec(str(texts), vocab_size=300), tmp_path / "out", workers=1)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("encoding: ")]
    shares = [int(re.fullmatch(r"encoding: (\d+)%, \d+:\d\d left", line)[1]) for line in said]  # type: ignore[index]
    assert len(said) == 82 // 5 and shares == sorted(shares) and shares[0] < 12 < 88 < shares[-1]
