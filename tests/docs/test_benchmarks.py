"""Every block of docs/benchmarks.md says when it was run, and on which commit."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/benchmarks.md"
MARK = re.compile(r"Run \d{4}-\d\d-\d\d, [0-9a-f]{7,}:")


def unmarked(page: str) -> list[str]:
    """Second lines of blocks, fenced or tables, without a mark above; `not run` ones need none."""
    # Paragraphs, and fenced blocks as they are: an output has empty lines of its own.
    found = re.split(r"(^```.*?^```$)|\n\n", page, flags=re.M | re.S)
    blocks = ["", *(block.strip() for block in found if block and block.strip())]
    return [
        block.splitlines()[1]
        for above, block in pairwise(blocks)
        if block.startswith(("```", "|"))
        and not all("not run" in row for row in block.splitlines()[2:])
        and not MARK.fullmatch(above)
    ]


def test_every_block_has_a_mark() -> None:
    page = PAGE.read_text()
    assert unmarked(page) == []
    assert len(MARK.findall(page)) >= 20


def test_a_missing_mark_is_seen() -> None:
    table, output = "| a |\n|---|\n| 1 |", "```\n$ run\n\n1\n```"
    mark = "Run 2026-11-21, 003fb25:"
    assert unmarked(f"{mark}\n\n{table}\n\n{mark}\n\n{output}") == []
    assert unmarked(f"{table}\n\n{mark}\n\n{output}") == ["|---|"]
    assert unmarked(f"{mark}\n\n{table}\n\nwords\n\n{output}") == ["$ run"]
