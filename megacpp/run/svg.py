"""Small drawings as inline SVG: lines, bars, one stacked bar. Colours are the page's CSS classes.

A drawing has no size of its own beyond its view box; text is what is in the data, escaped. `s0` to
`s7` are classes of series, `axis`, `grid`, `level`, `note` the rest (report_page.py has the CSS).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 640, 64, 12, 10, 28
POINTS = 600  # of a line, more are averaged
SERIES = 8
LETTER = 6.6  # width of a letter of a bar's words, about


@dataclass(frozen=True)
class Line:
    """A series; `dots` marks each point and joins none."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """A row of bars: where each begins, how long it is, its class, what it says.

    Pieces lie below each other, or with `joined` on one line.
    """

    name: str
    pieces: Sequence[tuple[float, float, str]]  # from, length, class
    words: str = ""
    joined: bool = False


def lines(
    series: Sequence[Line],
    words: Callable[[float], str],
    level: tuple[float, str] | None = None,
    height: int = 220,
    unit: float = 1.0,
    from_zero: bool = False,
) -> str:
    """Series over steps.

    Args:
        words: a value on the axis.
        unit: the axis has round numbers of these.
        level: a value to draw across, and its name.
    """
    finite = [
        [(x, y) for x, y in s.points if math.isfinite(x) and math.isfinite(y)] for s in series
    ]
    everything = [point for points in finite for point in points]
    if not everything:
        return ""
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    if level is not None:
        ys.append(level[0])
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
    for tick in nice_ticks(min(xs), max(xs), 7):
        parts.append(_text(across(tick), height - 8, f"{tick:g}", "axis middle"))
    if level is not None:
        y = up(level[0])
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(WIDTH - RIGHT, y - 4, level[1], "note end"))
    for number, (one, points) in enumerate(zip(series, finite, strict=True)):
        kind = f"s{number % SERIES}"
        if one.dots:
            parts += [
                f'<circle class="{kind}" cx="{across(x)}" cy="{up(y)}" r="3.5"/>' for x, y in points
            ]
        elif points:
            path = " ".join(f"{across(x)},{up(y)}" for x, y in thinned(points))
            parts.append(f'<polyline class="{kind} line" points="{path}"/>')
    return _drawing(parts, height) + _legend([s.name for s in series if s.name])


def bars(
    rows: Sequence[Bar],
    words: Callable[[float], str],
    level: tuple[float, str] | None = None,
    legend: Sequence[str] = (),
) -> str:
    """Rows of horizontal bars on one scale from 0; pieces of a row lie below each other."""
    ends = [start + length for row in rows for start, length, _ in row.pieces]
    most = max([*ends, level[0] if level else 0.0, 0.0])
    if most <= 0:
        return ""
    left, right = 168, 16 + round(LETTER * max(len(row.words) for row in rows))
    across = _scale(0, most, left, WIDTH - right)
    parts, y = [], 6.0
    for row in rows:
        lanes = 1 if row.joined else max(1, len(row.pieces))
        thick = 16 / lanes
        parts.append(_text(left - 8, y + 12, row.name, "axis end"))
        for number, (start, length, kind) in enumerate(row.pieces):
            x, end = across(start), across(start + length)
            parts.append(
                f'<rect class="{escape(kind)}" x="{x}" y="{y + number % lanes * thick:.1f}" '
                f'width="{max(0.75, end - x):.1f}" height="{thick - 1:.1f}"/>'
            )
        parts.append(_text(WIDTH - right + 8, y + 12, row.words, "axis"))
        y += 24
    if level is not None:
        x = across(level[0])
        parts.append(f'<line class="level" x1="{x}" x2="{x}" y1="2" y2="{y}"/>')
        parts.append(_text(x, y + 10, level[1], "note middle"))
        y += 14
    return _drawing(parts, int(y) + 4) + _legend(legend)


def stacked(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of pieces (name, length, what is said of it), with a legend in words."""
    whole = sum(size for _, size, _ in parts)
    if whole <= 0:
        return ""
    drawn, x = [], 0.0
    for number, (_, size, _) in enumerate(parts):
        width = size / whole * WIDTH
        drawn.append(
            f'<rect class="s{number % SERIES}" x="{x:.1f}" y="0" width="{width:.1f}" height="28"/>'
        )
        x += width
    return _drawing(drawn, 28) + _legend([f"{name} {said}" for name, _, said in parts])


def nice_ticks(low: float, high: float, most: int, outside: bool = False) -> list[float]:
    """About `most` round values, between those that are given or `outside` around them."""
    if high <= low:
        low, high = low - (abs(low) * 0.05 or 1), high + (abs(high) * 0.05 or 1)
    raw = (high - low) / most
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9) if outside else math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9) if outside else math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS of them: means of neighbours."""
    size = -(-len(points) // POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


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


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    marks = (
        f'<li><i class="s{n % SERIES}"></i>{escape(name)}</li>' for n, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(marks)}</ul>'
