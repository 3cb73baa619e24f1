"""docs/contracts.md against the functions: one row for each, with its state and its reason."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ARTICLES = range(5)
NUMBERS = {0: 11, 1: 4, 2: 6, 3: 10, 4: 11}  # contracts of each article


class Row(NamedTuple):
    contract: str
    words: str
    state: str
    test: str
    reason: str


def rows() -> list[Row]:
    lines = (ROOT / "docs/contracts.md").read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if "`test_s" in line]
    return [Row(*found[:3], found[3].strip("`"), found[4]) for found in cells]


def functions() -> dict[str, Callable[..., None]]:
    """Contract tests of all files, in order."""
    found: dict[str, Callable[..., None]] = {}
    for number in ARTICLES:
        module = importlib.import_module(f"tests.contracts.test_s{number}")
        own = {n: f for n, f in vars(module).items() if n.startswith("test_") and isfunction(f)}
        for name in own:
            assert name.startswith(f"test_s{number}_"), f"{name} is named after no contract"
        found |= own
    return found


def expected_failure(function: Callable[..., None]) -> str | None:
    """Return the reason of a strict expected failure, None of a contract that holds."""
    marks = [m for m in getattr(function, "pytestmark", []) if m.name == "xfail"]
    if not marks:
        return None
    assert marks[0].kwargs.get("strict") is True, f"{function.__name__}: would hide that it holds"
    assert set(marks[0].kwargs) == {"strict", "reason"} and not marks[0].args
    return marks[0].kwargs["reason"]


def test_every_function_has_one_row_and_every_row_one_function() -> None:
    assert [row.test for row in rows()] == list(functions())


def test_every_contract_of_the_articles_is_there() -> None:
    found = Counter(row.contract for row in rows())
    wanted = {f"S{a}-{n}" for a, last in NUMBERS.items() for n in range(1, last + 1)}
    assert wanted <= set(found)
    assert all(re.fullmatch(r"S\d-([a-h]|\d+)", contract) for contract in found)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.test)
def test_a_row_says_what_the_function_is(row: Row) -> None:
    article, number = re.fullmatch(r"test_s(\d)_(\d+|[a-h])_\w+", row.test).groups()  # type: ignore[union-attr]
    assert row.contract == f"S{article}-{number}"
    assert row.words.endswith(".") and ". " not in row.words, "one sentence"
    reason = expected_failure(functions()[row.test])
    assert row.state == "not yet" if reason else row.state in ("holds", "differs")
    assert row.reason == (reason or row.reason)
    assert bool(row.reason) == (row.state != "holds")


def test_a_lax_expected_failure_is_refused() -> None:
    @pytest.mark.xfail(reason="it may hold, and nobody would hear of it")
    def lax() -> None: ...

    with pytest.raises(AssertionError, match="would hide"):
        expected_failure(lax)
