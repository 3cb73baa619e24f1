"""The README's commands run, and what it shows is what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# A block of commands, and the block right after it that shows what the last one prints.
BLOCKS = re.findall(r"```bash\n(.*?)```\n(?:\n```text\n(.*?)```)?", README, re.S)
LONG = ("make ", "torchrun ", "git clone")


def commands() -> list[tuple[str, str]]:
    """(command, shown output or '') of every line of every bash block."""
    found = []
    for block, shown in BLOCKS:
        lines = [line.split("  #")[0].strip() for line in block.strip().splitlines()]
        found += [(line, "") for line in lines[:-1]] + [(lines[-1], shown)]
    return found


SHORT = [(c, shown) for c, shown in commands() if not c.startswith(LONG) and "runs/" not in c]


def test_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize(("command", "shown"), SHORT, ids=[c for c, _ in SHORT])
def test_short_commands_print_what_is_shown(command: str, shown: str) -> None:
    words = command.split()
    assert words[0] == "megacpp", f"how would a test run {command!r}?"
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, 2)
    if shown:
        assert shown.strip() == (done.stdout + done.stderr).strip()


def test_long_commands_still_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    long = [c for c, _ in commands() if c.startswith(LONG)]
    assert {"make train", "make test"} <= set(long)
    for command in long:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", makefile, re.M), command
        for script in re.findall(r"\S+\.py", command):
            assert (ROOT / script).exists(), command


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
