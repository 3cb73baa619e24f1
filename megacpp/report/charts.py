"""Charts: lines as inline SVG and bars as HTML; colours are classes of the page's style sheet.

A drawing has no size beyond its view box; texts are the data's, escaped. `s0` to `s7` are classes
of series, `axis`, `grid`, `level` and `note` the rest (style.py has the CSS).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from megacpp.report.style import SERIES, SMOOTH

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 66, 14, 10, 28
POINTS = 600  # most points of a line; more are averaged


@dataclass(frozen=True)
class ChartLine:
    """Series of a chart.

    Attributes:
        name: entry of the legend.
        points: values over steps.
        dots: draw points without a line.
        noisy: draw the smoothed series over the raw one.
        marks: draw points and a line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    noisy: bool = False
    marks: bool = False


@dataclass(frozen=True)
class Bar:
    """Row of bars: start, length and class of each, and a text.

    Pieces are below each other, or on one line if `joined`.
    """

    name: str
    pieces: Sequence[tuple[float, float, str]]  # from, length, class
    words: str = ""
    joined: bool = False


def lines(
    series: Sequence[ChartLine],
    words: Callable[[float], str],
    levels: Sequence[tuple[float, str]] = (),
    said: Sequence[str] = (),
    height: int = 200,
    unit: float = 1.0,
    from_zero: bool = False,
) -> str:
    """Return a chart of series over steps.

    Args:
        series: lines of the chart.
        words: formats a value of the axis.
        levels: values of horizontal lines, and their names; close ones don't hide each other's.
        said: lines below the drawing.
        height: height of the view box.
        unit: ticks are round multiples of it.
        from_zero: start the axis at zero.
    """
    finite = [
        [(x, y) for x, y in s.points if math.isfinite(x) and math.isfinite(y)] for s in series
    ]
    everything = [point for points in finite for point in points]
    if not everything:
        return ""
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    ys += [value for value, _ in levels]
    if from_zero:
        ys.append(0.0)
    ticks = [tick * unit for tick in nice_ticks(min(ys) / unit, max(ys) / unit, 5, outside=True)]
    low, high = ticks[0], ticks[-1]
    across = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _scale(low, high, height - BOTTOM, TOP)
    parts = []
    for tick in ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(LEFT - 6, y + 4, words(tick), "axis end"))
    for tick in nice_ticks(min(xs), max(xs), 5):
        side = "end" if across(tick) > WIDTH - 30 else "middle"
        parts.append(_text(across(tick), height - 6, f"{tick:,.10g}", f"axis {side}"))
    sides = ((LEFT + 4, "note"), (WIDTH - RIGHT, "note end"))
    for (value, name), (x, kind) in zip(levels, sides, strict=False):
        y = up(value)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(x, y - 4, name, kind))
    for number, (one, points) in enumerate(zip(series, finite, strict=True)):
        kind = f"s{number % SERIES}"
        if one.dots or one.marks:
            parts += [
                f'<circle class="{kind}" cx="{across(x)}" cy="{up(y)}" r="3.5"/>' for x, y in points
            ]
        if points and not one.dots:
            drawn = [(across(x), up(y)) for x, y in thinned(points)]
            title = f"<title>{escape(one.name)}</title>" if one.name else ""
            if one.noisy:
                parts.append(f'<polyline class="{kind} raw" points="{_path(drawn)}"/>')
                drawn = smoothed(drawn)
            path = _path(drawn)
            parts.append(f'<polyline class="{kind} line" points="{path}">{title}</polyline>')
    return _drawing(parts, height) + _legend([s.name for s in series if s.name], said)


def bars(
    rows: Sequence[Bar],
    words: Callable[[float], str],
    level: tuple[float, str] | None = None,
    legend: Sequence[str] = (),
) -> str:
    """Return rows of horizontal bars on one scale from 0, as HTML that wraps on narrow screens.

    Args:
        rows: bars.
        words: formats a value.
        level: value to mark in every row, and its name.
        legend: names of the classes.
    """
    ends = [start + length for row in rows for start, length, _ in row.pieces]
    most = max([*ends, level[0] if level else 0.0, 0.0])
    if most <= 0:
        return ""
    mark = f'<b style="left:{level[0] / most:.2%}"></b>' if level else ""
    found = []
    for row in rows:
        drawn = [
            f'<i class="{escape(kind)}" '
            f'style="left:{start / most:.2%};width:{length / most:.2%}"></i>'
            for start, length, kind in row.pieces
        ]
        lanes = ["".join(drawn)] if row.joined else drawn
        whole = ' class="whole"' if len(lanes) == 1 else ""
        track = "".join(f"<u{whole}>{lane}</u>" for lane in lanes)
        found.append(
            f'<div class="bar"><span>{escape(row.name)}</span>'
            f'<span class="track">{track}{mark}</span><span>{escape(row.words)}</span></div>'
        )
    said = [f"dashed: {level[1]}, {words(level[0])}"] if level else []
    return "".join(found) + _legend(legend, said)


def stacked(parts: Sequence[tuple[str, float, str]]) -> str:
    """Return one bar of pieces (name, length, text), with a legend in words."""
    whole = sum(size for _, size, _ in parts)
    if whole <= 0:
        return ""
    drawn = "".join(
        f'<i class="s{number % SERIES}" style="width:{size / whole:.3%}"></i>'
        for number, (_, size, _) in enumerate(parts)
    )
    return f'<div class="stack">{drawn}</div>' + _legend([f"{n} {said}" for n, _, said in parts])


def nice_ticks(low: float, high: float, most: int, outside: bool = False) -> list[float]:
    """Return about `most` round values.

    Args:
        low: smallest value.
        high: largest value.
        most: approximate number of ticks.
        outside: include the round values around the range.
    """
    if high <= low:
        low, high = low - (abs(low) * 0.05 or 1), high + (abs(high) * 0.05 or 1)
    raw = (high - low) / most
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9) if outside else math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9) if outside else math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most POINTS points: means of neighbours."""
    size = -(-len(points) // POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return exponential means of the y values, unbiased at the start."""
    found, total, weight = [], 0.0, 0.0
    for x, y in points:
        total = SMOOTH * total + (1 - SMOOTH) * y
        weight = SMOOTH * weight + (1 - SMOOTH)
        found.append((x, round(total / weight, 1)))
    return found


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda value: round(start + (value - low) / span * (end - start), 1)


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


def _drawing(parts: Sequence[str], height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )


def _legend(names: Sequence[str], more: Sequence[str] = ()) -> str:
    if len(names) < 2:
        names = ()
    marks = [
        f'<li><i class="s{n % SERIES}"></i>{escape(name)}</li>' for n, name in enumerate(names)
    ]
    marks += [f"<li>{escape(words)}</li>" for words in more]
    return f'<ul class="legend">{"".join(marks)}</ul>' if marks else ""
