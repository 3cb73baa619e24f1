"""Picture of the packages of the code: an arrow goes to a package that another one imports."""

from __future__ import annotations

import itertools
from functools import cache

from bench.architecture import Box, packages_and_arrows
from bench.pictures.svg import Drawing

WIDE, HIGH, GAP, WIDTH = 128.0, 24.0, 44.0, 760.0
Point = tuple[float, float]


def rows() -> list[list[Box]]:
    """Return boxes from top to bottom: each row is above all that it imports.

    Boxes of a row stand in the order that makes the arrows shortest.
    """
    arrows = packages_and_arrows()

    @cache
    def level(box: Box) -> int:
        return 1 + max(map(level, arrows[box]), default=-1)

    levels = range(max(map(level, arrows)), -1, -1)
    found = [[box for box in arrows if level(box) == row] for row in levels]

    def sideways(order: tuple[tuple[Box, ...], ...]) -> float:
        x = {box: at for row in order for box, at in zip(row, centres(len(row)), strict=True)}
        return sum(abs(x[box] - x[other]) for box in arrows for other in arrows[box])

    orders = itertools.product(*(itertools.permutations(row) for row in found))
    return [list(row) for row in min(orders, key=sideways)]


def centres(count: int) -> list[float]:
    """Return the middles of the boxes of a row."""
    return [WIDTH * (number + 0.5) / count for number in range(count)]


def picture_of_packages() -> Drawing:
    """Draw the packages in rows, and arrows that go around the boxes between two rows."""
    title = "Packages of the code: an arrow goes to a package that another one imports"
    drawing = Drawing(WIDTH, title)
    order, y = rows(), 16.0
    middles, tops, highs = {}, [], []
    for row in order:
        tops.append(y)
        highs.append(HIGH * max(map(len, row)))
        for box, x in zip(row, centres(len(row)), strict=True):
            middles[box] = x, len(tops) - 1
        y += highs[-1] + GAP

    def way(box: Box, other: Box) -> list[Point]:
        (x, row), (to_x, to_row) = middles[box], middles[other]
        points = [(x, tops[row] + HIGH * len(box))]
        for between in range(row + 1, to_row):
            at = x + (to_x - x) * (between - row) / (to_row - row)
            for middle in centres(len(order[between])):
                if abs(at - middle) < WIDE / 2 + 10:
                    at = middle + (WIDE / 2 + 10) * (1 if at >= middle else -1)
            points += [(at, tops[between]), (at, tops[between] + highs[between])]
        return [*points, (to_x, tops[to_row])]

    for box, others in packages_and_arrows().items():
        for other in others:
            points = way(box, other)
            x, tip = points[-1]
            drawing.path(points, "line")
            drawing.path([(x - 4, tip - 7), (x, tip), (x + 4, tip - 7)], "edge")
    for box, (x, row) in middles.items():
        for number, package in enumerate(sorted(box)):
            drawing.rect(x - WIDE / 2, tops[row] + HIGH * number, WIDE, HIGH, row, package)
    return drawing
