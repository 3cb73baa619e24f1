"""Axes of a chart: linear or logarithmic scales, and what is drawn along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.pictures.svg import Drawing

Point = tuple[float, float]


def ticks(most: float) -> range:
    """Return round numbers from 0 to at most `most`, seven or fewer."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if most / s <= 6)
    return range(0, int(most) + 1, step)


@dataclass(frozen=True)
class Axes:
    """Place of a chart in a drawing, and the values at its ends.

    Attributes:
        drawing: where.
        left, top, wide, high: rectangle of the chart in pixels.
        x, y: least and largest value of each direction.
        log: the directions that are logarithmic, such as `xy`.
    """

    drawing: Drawing
    left: float
    top: float
    wide: float
    high: float
    x: Point
    y: Point
    log: str = ""

    def at(self, x: float, y: float) -> Point:
        """Return the place of a pair of values."""
        return (
            self.left + self.wide * self._part(x, self.x, "x"),
            self.top + self.high * (1 - self._part(y, self.y, "y")),
        )

    def frame(
        self, xs: Sequence[float], ys: Sequence[float], names: tuple[str, str], form: str = "g"
    ) -> None:
        """Draw the axes with values at ticks, and the names of both: below, and above at the left.

        Args:
            xs: values with a tick below.
            ys: values with a pale line.
            names: of the horizontal and of the vertical scale.
            form: format of the values at the left.
        """
        bottom = self.top + self.high
        for value in ys:
            y = self.at(self.x[0], value)[1]
            self.drawing.path([(self.left, y), (self.left + self.wide, y)], "pale")
            self.drawing.text(self.left - 8, y + 4, f"{value:{form}}", "note", end=True)
        for value in xs:
            x, words = self.at(value, self.y[0])[0], f"{value:,.10g}"
            self.drawing.path([(x, bottom), (x, bottom + 4)], "line")
            self.drawing.text(x - 3.3 * len(words), bottom + 18, words, "note")
        corner = [(self.left, self.top), (self.left, bottom), (self.left + self.wide, bottom)]
        self.drawing.path(corner, "line")
        if names[1]:
            self.drawing.text(self.left - 46, self.top - 12, names[1], "note")
        if names[0]:
            self.drawing.text(self.left + self.wide, bottom + 36, names[0], "note", end=True)

    def line(self, points: Iterable[Point], kind: str) -> None:
        """Draw a line through pairs of values."""
        self.drawing.path([self.at(*point) for point in points], kind)

    def dot(self, x: float, y: float, kind: int | str, size: float = 8) -> Point:
        """Draw a square at a pair of values; return its place.

        Args:
            x: horizontal value.
            y: vertical value.
            kind: number of a fill, or a class.
            size: side of the square in pixels.
        """
        to_x, to_y = self.at(x, y)
        self.drawing.rect(to_x - size / 2, to_y - size / 2, size, size, kind)
        return to_x, to_y

    def _part(self, value: float, ends: Point, direction: str) -> float:
        if direction in self.log:
            value, ends = math.log(value), (math.log(ends[0]), math.log(ends[1]))
        return (value - ends[0]) / (ends[1] - ends[0])
