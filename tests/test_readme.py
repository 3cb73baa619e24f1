"""README: its commands run, and its output is what they print."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics

import pytest

from megacpp.cli.main import main
from tests.launch import forked

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# A block of commands, and the block right after it that shows what the last one prints.
BLOCKS = re.findall(r"```bash\n(.*?)```\n(?:\n```text\n(.*?)```)?", README, re.S)
LONG = ("make ", "torchrun ", "git clone")
# Seconds instead of minutes.
SMALL = (
    "--model.dim 32 --model.depth 2 --model.pattern AF --model.vocab-size 5000"
    " --model.attention.num-heads 2 --model.attention.num-kv-heads 1"
    " --model.attention.head-dim 16 --model.mlp.hidden-dim 64 --data.seq-len 64 --run.steps 2"
    " --run.sample-tokens 8"
).split()


def commands() -> list[tuple[str, str]]:
    """(command, shown output or '') of every line of every bash block."""
    found = []
    for block, shown in BLOCKS:
        lines = [line.split("  #")[0].strip() for line in block.strip().splitlines()]
        found += [(line, "") for line in lines[:-1]] + [(lines[-1], shown)]
    return found


OWN = [c for c, _ in commands() if c.split()[-1].startswith("texts") or "/texts" in c]
SHORT = [
    (c, shown)
    for c, shown in commands()
    if not c.startswith(LONG) and "runs/" not in c and c not in OWN
]


def test_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


def test_numbers_of_the_first_screen() -> None:
    chapters = len(list((ROOT / "docs").glob("[0-9]*.md")))
    lines = len((ROOT / "train.py").read_text().splitlines())
    assert f"{chapters} chapters" in README and f"`train.py` is {lines} lines" in README


@pytest.mark.parametrize(("command", "shown"), SHORT, ids=[c for c, _ in SHORT])
def test_short_commands_print_what_is_shown(command: str, shown: str) -> None:
    words = command.split()
    assert words[0] == "megacpp", f"how would a test run {command!r}?"
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    refused = shown.startswith("error: ")
    assert done.returncode == (2 if refused else 0), done.stdout + done.stderr
    if shown:
        assert shown.strip() == (done.stdout + done.stderr).strip()


def test_own_text_to_a_sample_in_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """80 files of Python's reference manual; the model is made small, the commands are as shown."""
    prepare, train, sample = (shlex.split(command) for command in OWN)
    (tmp_path / "texts").mkdir()
    parts = dict.fromkeys(text[i : i + 3000] for text in topics.topics.values() for i in (0, 3000))
    for number, text in enumerate([part for part in parts if len(part) > 500][:80]):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "texts" / "cover.png").write_bytes(b"\x89PNG\0")
    monkeypatch.chdir(tmp_path)
    assert main(prepare[1:]) == 0
    said = capfd.readouterr().out
    assert "(80 .txt files)" in said and "skipped 1 .png: not text" in said
    assert "text kind: prose (" in said and "xz -9" in said
    few = re.search(r"few held-out documents: ([5-9]) of 80 with ", said)  # by their hashes
    assert few is not None, said
    assert train[:4] == ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    folder = str(tmp_path)  # ranks of the test start in the repository
    here = [f"{folder}/{w}" if w.startswith(("data/", "runs/")) else w for w in train[4:]]
    done = forked(*here, *SMALL, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "ids, the model 5,000: " in done.stdout and "rows unused" in done.stdout
    held_out = f"{few[1]} held-out documents"
    assert f"no verdict: {held_out} are too few, 64 are needed" in done.stdout
    assert "below gzip" not in done.stdout
    prompt = json.loads((tmp_path / "data/texts/index.json").read_text())["sample_prompt"]
    assert f"---- sample ----\n{prompt}" in done.stdout
    assert main(sample[1:]) == 0
    assert capfd.readouterr().out.startswith("The")


def test_long_commands_still_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    long = [c for c, _ in commands() if c.startswith(LONG)]
    assert {"make train", "make check", "make test"} <= set(long)
    for command in long:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", makefile, re.M), command
        for script in re.findall(r"\S+\.py", command):
            assert (ROOT / script).exists(), command


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
