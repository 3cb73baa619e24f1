"""Book: every chapter's code runs; its printed figures, length and links are checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from megacpp import __version__
from tests.docs.run_chapter import DriftError, run_chapter

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "docs").glob("[0-9]*.md"))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_chapter_runs_and_figures_match(chapter: Path, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    assert run_chapter(chapter, update=bool(request.config.getoption("--update-docs"))) > 0


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_chapter_has_the_shape_of_a_chapter(chapter: Path) -> None:
    text = chapter.read_text()
    prose = prose_of(text)
    assert len(prose) <= 8000
    wide = [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("![")]
    assert wide == [], "fill the paragraph at 100 columns"
    title, *_ = text.splitlines()
    assert title.startswith("# ") and title.endswith("?"), "a chapter answers its title"
    idea = [x for x in prose_of(text.split("\n## ")[0]).splitlines()[1:] if x and x[:2] != "!["]
    assert 4 <= len(idea) <= 13, "it opens with its idea, in about ten lines"
    _, heading, exercise = text.partition("\n## Break it\n")
    assert heading and "<details>" in exercise, "it ends with an exercise and its folded answer"
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert (chapter.parent / link).exists(), f"{chapter.name}: broken link {link}"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_lines_of_code_fit(chapter: Path) -> None:
    """Those of Python, commands and diagrams; what is printed, and formulas, may be wider."""
    lines = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", chapter.read_text(), re.M | re.S):
        if kind == "console":
            block = re.match(r"\$ (?:[^\n]*\\\n)*[^\n]*\n", block)[0]  # type: ignore[index]
        if kind not in ("output", "math"):
            lines += block.splitlines()
    assert lines and [line for line in lines if len(line) > 100] == []


def prose_of(text: str) -> str:
    """Return a chapter without its code, its figures and its tables."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def python_of(chapter: Path) -> str:
    """The Python code of a chapter."""
    return "".join(re.findall(r"^```python\n(.*?)^```$", chapter.read_text(), re.M | re.S))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_imports_what_is_installed(chapter: Path) -> None:
    assert not re.findall(
        r"^\s*(?:from|import) (?:tests|bench|train)\b.*", python_of(chapter), re.M
    )


def section(chapter: Path, *headings: str) -> str:
    """Return the sections of a chapter whose headings begin so."""
    sections = chapter.read_text().split("\n## ")[1:]
    return "".join(part for part in sections if part.startswith(headings))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_asks_what_its_program_answers(chapter: Path) -> None:
    asked, _, answers = section(chapter, "Questions").partition("<summary>Answers</summary>")
    assert re.findall(r"^(\d)\. ", asked, re.M) == ["1", "2", "3"]
    assert not re.search(r"\bwhy\b", asked, re.I), "a question has an answer that can be printed"
    printed = re.findall(r"^```(?:console|output)\n(.+?)^```$", answers, re.M | re.S)
    figures = re.findall(
        r"\d[\d.,]*", re.sub(r"^\$ (?:.*\\\n)*.*\n", "", "".join(printed), flags=re.M)
    )
    assert len(set(figures)) >= 3, "each answer is printed"
    costs = section(chapter, "What it costs", "When it is worth it")
    assert re.search(r"\bms\b|\bmilliseconds?\b", costs), "a cost in time"
    assert re.search(r"\b(?:bytes?|[KMGT]i?B)\b", costs), "a cost in bytes"


PREDICTED = re.compile(r"\$ megacpp speed|\bms\b.*\bH[12]00|\bH[12]00.*\bms\b", re.S)


def times_as_if_measured(text: str) -> list[str]:
    """Return the sections that show times of a GPU and don't say that they are predicted."""
    sections = (re.sub(r"^!\[.*", "", part, flags=re.M) for part in text.split("\n## ")[1:])
    timed = [part for part in sections if PREDICTED.search(part)]
    return [part.partition("\n")[0] for part in timed if not re.search("predict", part, re.I)]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_a_predicted_time_is_called_so(chapter: Path) -> None:
    assert times_as_if_measured(chapter.read_text()) == []


def test_a_time_as_if_measured_is_found() -> None:
    text = "# Q?\n\n## Cost\n\nA step{} takes 77 ms on 8 H100.\n\n## Other\n\nA save takes 77 ms.\n"
    assert times_as_if_measured(text.format("")) == ["Cost"]
    assert times_as_if_measured(text.format(", as predicted,")) == []


# Row of docs/torture.md: its figures, and the words around the same ones in chapter 40.
ATTACKS = {
    "R1": [(r"(\d+) saves ended", r"(\d+) saves ended halfway were all resumed")],
    "R3": [(r"(\d+) flipped bits found", r"(\d+) of \d+ flipped bits of files were found")],
    "R15": [(r"(\d+ of \d+) ended with 4", r"(\d+ of \d+) failing disks ended with code 4")],
    "R18": [(r"(\d+ of \d+) named", r"(\d+ of \d+) hangs and slow ranks named")],
    "SDC": [
        (r"weights \d+ of (\d+)", r"Bits were flipped, (\d+) in each"),
        (r"\((\d+) changed nothing", r"All were found but (\d+) in activations"),
        (r"takes ([\d.]+) microbatches", r"\[measured\]\(torture.md\): ([\d.]+);"),
        (r"memory \+([\d.]+%)", r"and ([\d.]+%) more memory"),
    ],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_figures_of_attacks_are_those_of_their_table(attack: str) -> None:
    table = (ROOT / "docs/torture.md").read_text()
    row = next(line for line in table.splitlines() if line.startswith(f"| {attack} |"))
    chapter = " ".join((ROOT / "docs/40-failures.md").read_text().split())
    for of_row, of_chapter in ATTACKS[attack]:
        assert re.findall(of_row, row)[:1] == re.findall(of_chapter, chapter), of_row


def test_a_chapter_runs_outside_of_the_checkout(tmp_path: Path) -> None:
    """With the four installed packages on the path, and nothing else of this repository."""
    installed = tmp_path / "installed"
    installed.mkdir()
    for name in ("megacpp", "parallel", "optim", "checkpointing"):
        (installed / name).symlink_to(ROOT / name)
    code = tmp_path / "chapter.py"
    code.write_text(python_of(ROOT / "docs/10-the-mesh.md"))
    done = subprocess.run(
        [sys.executable, str(code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(
        r"^```output\n(.*?)^```$", (ROOT / "docs/10-the-mesh.md").read_text(), re.M | re.S
    )
    assert done.stdout == "".join(shown)


def test_a_drifted_figure_fails(tmp_path: Path) -> None:
    chapter = tmp_path / "00-x.md"
    chapter.write_text("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n")
    with pytest.raises(DriftError, match="prints"):
        run_chapter(chapter)
    assert run_chapter(chapter, update=True) == 1
    assert run_chapter(chapter) == 1
    assert "```output\n2\n```" in chapter.read_text()


def test_prose_that_repeats_an_old_figure_is_named(tmp_path: Path) -> None:
    chapter = tmp_path / "00-x.md"
    block = "```python\nprint(77.3, 5, 12)\n```\n\n```output\n83.0 5 12\n```\n"
    chapter.write_text(f"A step takes 83.0 ms, 12 of them wait.\n\n{block}")
    (tmp_path / "01-y.md").write_text("At 83 ms a step, 83 steps.\n\n```text\n83 ms\n```\nIn 83.\n")
    with pytest.warns(UserWarning) as warned:
        run_chapter(chapter, update=True)
    assert [str(w.message) for w in warned] == [
        "00-x.md:1: is 83.0 still so? A step takes 83.0 ms, 12 of them wait.",
        "01-y.md:1: is 83 still so? At 83 ms a step, 83 steps.",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_chapter(chapter, update=True)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("python -c 'print(1 + 1)'", "2"),
        ("megacpp \\\n    --version", __version__),
        ("megacpp explain tiny --mesh.tp 2 --world 2 | head -n 1", "tiny on 2 rank(s): tp=2"),
    ],
)
def test_a_command_prints_what_is_shown(tmp_path: Path, command: str, printed: str) -> None:
    chapter = tmp_path / "00-x.md"
    chapter.write_text(f"```console\n$ {command}\n3\n```\n")
    with pytest.raises(DriftError, match="prints"):
        run_chapter(chapter)
    assert run_chapter(chapter, update=True) == 1
    assert chapter.read_text() == f"```console\n$ {command}\n{printed}\n```\n"


@pytest.mark.parametrize("after", ["", "```console\n$ megacpp --version\n```\n"])
def test_a_block_that_prints_must_show_it(tmp_path: Path, after: str) -> None:
    chapter = tmp_path / "00-x.md"
    chapter.write_text(f"```python\nprint(1)\n```\n{after}")
    with pytest.raises(DriftError, match="shows nothing"):
        run_chapter(chapter)
