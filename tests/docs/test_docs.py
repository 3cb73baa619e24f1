"""Book: every chapter's code runs; its printed figures, length and links are checked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.docs.run_chapter import DriftError, run_chapter

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "docs").glob("[0-9]*.md"))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_chapter_runs_and_figures_match(chapter: Path, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    assert run_chapter(chapter, update=request.config.getoption("--update-docs")) > 0


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.stem)
def test_chapter_has_the_shape_of_a_chapter(chapter: Path) -> None:
    text = chapter.read_text()
    assert len(text.splitlines()) <= 200
    assert "<details>" in text, "a chapter ends with a 'break it' exercise and its folded answer"
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert (chapter.parent / link).exists(), f"{chapter.name}: broken link {link}"


def test_a_drifted_figure_fails(tmp_path: Path) -> None:
    chapter = tmp_path / "00-x.md"
    chapter.write_text("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n")
    with pytest.raises(DriftError, match="prints"):
        run_chapter(chapter)
    assert run_chapter(chapter, update=True) == 1
    assert run_chapter(chapter) == 1
    assert "```output\n2\n```" in chapter.read_text()


def test_a_block_that_prints_must_show_it(tmp_path: Path) -> None:
    chapter = tmp_path / "00-x.md"
    chapter.write_text("```python\nprint(1)\n```\n")
    with pytest.raises(DriftError, match="shows nothing"):
        run_chapter(chapter)
