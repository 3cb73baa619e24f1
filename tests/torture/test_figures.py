"""Rows of `make torture` made of what tests recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megacpp.run.goodput import Account
from tests.figures import figures
from tests.launch import ROOT
from tests.torture.__main__ import OWN, ROWS, TESTS
from tests.torture.killing import cost_of_kills

PAGE = ROOT / "docs/torture.md"

pytest_plugins = ["pytester"]


def test_counts_add_up_and_failures_add_none(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", [2, 3, 4])
        def test_one(n, record_property):
            assert n < 4
            record_property("kills survived", n)
            record_property("largest difference", n / 1e9)

        def test_other(): ...
        """
    )
    pytester.runpytest("--junitxml=report.xml", "-p", "no:cacheprovider")
    found = figures(Path(pytester.path / "report.xml"))
    assert found == "5 kills survived; largest difference 3e-09; 3 tests passed; 1 failures"


@pytest.mark.parametrize("values", [("nan", "1e-9"), ("1e-9", "nan"), ("inf", "1e-9")])
def test_a_figure_that_is_not_finite_is_the_largest(
    values: tuple[str, str], tmp_path: Path
) -> None:
    rows = "".join(f'<property name="largest difference" value="{value}"/>' for value in values)
    report = tmp_path / "report.xml"
    counts = 'tests="2" failures="0" errors="0" skipped="0"'
    report.write_text(f"<testsuites><testsuite {counts}>{rows}</testsuite></testsuites>")
    assert figures(report) == "largest difference inf; 2 tests passed"


def test_kills_may_be_as_far_apart_as_ten_times_their_cost() -> None:
    seconds = {"step": 60.0, "restart_lost": 12.0, "idle": 30.0}
    said = cost_of_kills(Account(seconds, 102.0, startup_s=30.0, redone_s=6.0, starts=3))
    assert said == (
        "a kill costs a start of 10.0 s and 6.0 s of lost steps and waits, so 90% needs 160 s "
        "between two"
    )
    one = cost_of_kills(Account(seconds, 102.0, startup_s=30.0, redone_s=0.0, starts=1))
    assert one == "no start followed a kill"


def test_every_bar_has_a_row_with_a_figure() -> None:
    """A row's figure is one of its own attack, or what its tests record."""
    assert {*TESTS, *OWN} == {*ROWS} >= {f"R{n}" for n in range(1, 26)}
    for _, files in TESTS.values():
        texts = [(ROOT / "tests" / name.split("::")[0]).read_text() for name in files.split()]
        assert all(text.count("    record_property(") for text in texts), files


def test_the_page_has_a_dated_figure_of_every_bar() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == [f"| {name}" for name in ROWS]
    for name, _, figure, seconds, run in rows[1:]:
        assert re.search(r"\d", figure) and not re.search(
            r"FAILED|DIFFER|Error|not measured", figure
        ), name
        assert float(seconds) > 0 and re.match(r"20\d\d-\d\d-\d\d [0-9a-f]{9}(,| )", run), name
