"""Figures that tests record where they have checked them; `make torture` prints them.

    def test_kills(record_property: Record) -> None:
        ...
        record_property("kill -9 during a save, resumed", 60)

A whole number is summed over all tests that record it, of fractions the largest is kept. They are
recorded behind the assertions: a test that fails adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from tests.differences import largest

Record = Callable[[str, object], None]


def figures(report: Path) -> str:
    """Return what the tests of a JUnit report recorded, and how many passed, in one line.

    Args:
        report: written by pytest's `--junitxml`.
    """
    root = ElementTree.parse(report).getroot()
    counts: dict[str, int] = {}
    most: dict[str, float] = {}
    for one in root.iter("property"):
        name, value = one.attrib["name"], one.attrib["value"]
        if value.isdecimal():
            counts[name] = counts.get(name, 0) + int(value)
        else:
            most[name] = largest([most.get(name, 0.0), float(value)])
    found = [f"{value:,} {name}" for name, value in counts.items()]
    found += [f"{name} {value:.2g}" for name, value in most.items()]
    suite = next(root.iter("testsuite")).attrib
    bad = {key: int(suite[key]) for key in ("failures", "errors", "skipped")}
    found.append(f"{int(suite['tests']) - sum(bad.values())} tests passed")
    found += [f"{value} {key}" for key, value in bad.items() if value]
    return "; ".join(found)
