"""Charts of a page: smoothed lines, ticks, drawings of little or nothing."""

from __future__ import annotations

import math
import random

import pytest

from megacpp.report.charts import (
    POINTS,
    Bar,
    ChartLine,
    bars,
    lines,
    nice_ticks,
    smoothed,
    stacked,
    thinned,
)
from tests.report.test_page import svgs


def test_a_smoothed_line_starts_with_its_first_point_and_lags() -> None:
    assert smoothed([(0, 5.0), (1, 5.0)]) == [(0, 5.0), (1, 5.0)]
    found = smoothed([(0, 0.0), (1, 90.0)])
    assert found[0] == (0, 0.0) and found[1][1] == pytest.approx(90 * 0.2 / 0.36, abs=0.05)


def test_ticks_are_round_and_span_what_is_asked() -> None:
    assert nice_ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    rng = random.Random(0)
    for _ in range(500):
        low = rng.uniform(-1, 1) * 10 ** rng.uniform(-6, 9)
        high = low + 10 ** rng.uniform(-3, 6) * max(1e-3, abs(low))
        inside, around = nice_ticks(low, high, 5), nice_ticks(low, high, 5, outside=True)
        slack = 1e-6 * (high - low)
        assert all(low - slack <= t <= high + slack for t in inside) and 2 <= len(inside) <= 6
        assert around[0] <= low + slack and around[-1] >= high - slack and len(around) <= 8
    assert len(nice_ticks(3, 3, 5)) > 1


def test_drawings_of_little_or_nothing() -> None:
    assert lines([ChartLine("", [])], str) == "" and bars([Bar("a", [])], str) == ""
    assert stacked([("a", 0.0, "")]) == ""
    holes = [(0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 1.0)]
    assert len(svgs(lines([ChartLine("", holes)], str))) == 1
    many = [(float(n), 1.0) for n in range(10_000)]
    assert len(thinned(many)) <= POINTS and {y for _, y in thinned(many)} == {1.0}
    assert thinned(many[:5]) == many[:5]
