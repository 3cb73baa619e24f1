"""Curves of continued training, from docs/continued.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.continued import LONG, PLACES, ROW
from bench.pictures.charts import Axes
from bench.pictures.measured import read
from bench.pictures.svg import Drawing

LEFT, TOP, HIGH, GAP = 54.0, 78.0, 250.0, 76.0
AT_ONCE, TUNED = ("yarn 0", "theta 0"), ("yarn 60", "theta 60")
STABLE = ("stable 64", "stable 128", "stable 256")

Points = list[tuple[float, float]]


class Panel(NamedTuple):
    """Chart with its lines: class of each, and its points."""

    title: str
    lines: Sequence[tuple[str, Points]]
    unit: str
    most: float  # end of the horizontal scale
    value: str = "nats"


def other_corpus_and_tails() -> Drawing:
    """Draw losses on two corpora with three shares of rehearsal; WSD's tails against cosines."""
    runs = _runs()
    names = ("python", "python, 10% rehearsal", "python, 25% rehearsal")
    kinds = ("s1", "s0", "s3")
    start = 0, runs["base"][-1][1]  # the weights that these runs begin with
    lines = [
        (kind, [(step, found[source]) for step, found in [start, *runs[name]]])
        for name, kind in zip(names, kinds, strict=True)
        for source in ("headers", "python")
    ]
    stable = [point for name in STABLE for point in _headers(runs[name])]
    ends = (name for name in runs if name.startswith("tail "))
    tails = [("s1", [stable_end(runs, name), *_headers(runs[name])]) for name in ends]
    cosines = [("s0", _headers(runs[name])) for name in ("cosine 80", "cosine 160", "base")]
    drawing = Drawing(760, "Held-out loss: another corpus with rehearsal, and tails of WSD")
    drawing.legend(
        LEFT, 12, [(k, n) for k, n in zip(kinds, ("no rehearsal", "10%", "25%"), strict=True)]
    )
    drawing.legend(430, 12, [("s0", "cosine"), ("line", "stable"), ("s1", "its tails")])
    draw(
        drawing,
        [
            Panel("headers rise, Python falls", lines, "steps of Python", 160),
            Panel("headers: three lengths", [*cosines, ("line", stable), *tails], "steps", 320),
        ],
    )
    return drawing


def longer_rows_more_ids() -> Drawing:
    """Draw the loss along a row of four times the trained length, and that of a vocabulary."""
    ways = {"s1": "unchanged", "s0": "YaRN", "s3": "larger theta"}
    drawing = Drawing(760, "Held-out loss: by place in longer rows, and with more ids over steps")
    drawing.legend(LEFT, 12, list(ways.items()))
    drawing.legend(523, 12, [("s1", "1,024 ids"), ("s0", "1,088 ids")])
    before, after = (_place_lines(names) for names in (("base", *AT_ONCE), ("long 60", *TUNED)))
    unit = "place"
    draw(
        drawing,
        [
            Panel("rows of 512, at once", before, unit, LONG),
            Panel("after 60 steps", after, unit, LONG),
            Panel("more ids: bits per byte", vocabularies(), "steps", 100, "bits"),
        ],
    )
    return drawing


def vocabularies() -> list[tuple[str, Points]]:
    """Return held-out bits per byte over steps, of the vocabulary as it was and of the grown one.

    Bits per byte are nats per token times a constant of the corpus and its tokenizer, which the
    last evaluation gives.
    """
    runs, bits = _runs(), {run["variant"]: run["bits_per_byte"] for run in _of_one_seed()}
    lines = []
    for kind, start, name, source in (
        ("s1", "base", "as it was 100", "python"),
        ("s0", "grown 0", "grown 100", "grown"),
    ):
        of_a_nat = bits[name] / runs[name][-1][1][source]
        evaluations = [(0, runs[start][-1][1]), *runs[name]]
        lines.append((kind, [(step, found[source] * of_a_nat) for step, found in evaluations]))
    return lines


def _place_lines(names: Sequence[str]) -> list[tuple[str, Points]]:
    """Return lines of losses by place, and one where the rows of the first training end."""
    record = read("continued")["token_losses"]
    found = {name: record[f"{name}, by place"][0] for name in names}
    lines = [
        (kind, [((i + 0.5) * LONG / PLACES, loss) for i, loss in enumerate(found[name])])
        for kind, name in zip(("s1", "s0", "s3"), names, strict=True)
    ]
    every = [loss for losses in found.values() for loss in losses]
    return [("line", [(ROW, min(every)), (ROW, max(every))]), *lines]


def draw(drawing: Drawing, panels: Sequence[Panel]) -> None:
    """Draw charts side by side, each with scales of its own."""
    wide = (drawing.width - LEFT - 16 - GAP * (len(panels) - 1)) / len(panels)
    for number, (title, lines, unit, most_x, value) in enumerate(panels):
        left = LEFT + number * (wide + GAP)
        every = [point for _, points in lines for point in points]
        low = math.floor(2 * min(y for _, y in every)) / 2
        high = math.ceil(2 * max(y for _, y in every)) / 2
        drawing.text(left, TOP - 30, title, "head")
        axes = Axes(drawing, left, TOP, wide, HIGH, (0, most_x), (low, high))
        halves = [half / 2 for half in range(int(2 * low), int(2 * high) + 1)]
        axes.frame([most_x * n / 4 for n in range(1, 5)], halves, (unit, value), ".1f")
        for kind, points in lines:
            axes.line(points, kind)


def stable_end(runs: dict[str, Any], tail: str) -> tuple[float, float]:
    """Return the last point of the stable run that a tail goes on from."""
    ends = [runs[name][-1] for name in STABLE]
    step, found = max((end for end in ends if end[0] < runs[tail][-1][0]), key=lambda end: end[0])
    return step, found["headers"]


def _runs() -> dict[str, Any]:
    return {run["variant"]: run["held_out"] for run in _of_one_seed()}


def _of_one_seed() -> list[dict[str, Any]]:
    return [run for run in read("continued")["runs"] if run["seed"] == 1]


def _headers(evaluations: list[Any]) -> Points:
    return [(step, found["headers"]) for step, found in evaluations]
