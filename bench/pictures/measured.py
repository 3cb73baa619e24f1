"""Pictures of what was measured once: a loss, recomputation, published steps (docs/*.json)."""

from __future__ import annotations

import json
import math
from typing import Any

from bench.pictures.memory import scale
from bench.pictures.svg import Drawing
from bench.reference import ROOT

LEFT, TOP, WIDE, HIGH = 64.0, 62.0, 660.0, 250.0
Point = tuple[float, float]


def read(name: str) -> Any:
    """Return what a file of docs holds."""
    return json.loads((ROOT / f"docs/{name}.json").read_text())


def across(drawing: Drawing, most: float, step: int, unit: str) -> None:
    """Draw a scale below a chart.

    Args:
        drawing: where.
        most: largest value.
        step: between two ticks.
        unit: its unit.
    """
    drawing.path([(LEFT, TOP + HIGH), (LEFT + WIDE, TOP + HIGH)], "line")
    for value in range(0, int(most) + 1, step):
        x, y = LEFT + value / most * WIDE, TOP + HIGH
        drawing.path([(x, y), (x, y + 4)], "line")
        drawing.text(x - 3.3 * len(str(value)), y + 18, f"{value}", "note")
    drawing.text(LEFT + WIDE, TOP + HIGH + 34, unit, "note", end=True)


def tiny_loss() -> Drawing:
    """Draw bits per byte of the steps of `make train`, held-out text, gzip and xz."""
    found = read("tiny-loss")
    steps = found["bits_per_byte"]
    title = f"Bits per byte of {len(steps)} steps of tiny, of held-out text, and of gzip and xz"
    drawing, most = Drawing(760, title), math.ceil(2 * max(steps)) / 2

    def at(step: int, value: float) -> Point:
        return LEFT + step / len(steps) * WIDE, TOP + HIGH * (1 - value / most)

    last = [steps[max(0, i - 9) : i + 1] for i in range(len(steps))]
    means = [sum(ten) / len(ten) for ten in last]
    names: list[tuple[int | str, str]] = [("off", "a step"), (0, "mean of ten"), (1, "held out")]
    drawing.legend(LEFT, 12, names)
    scale(drawing, LEFT, TOP, HIGH, most, "")
    drawing.text(14, TOP - 12, "bits per byte", "note")
    across(drawing, len(steps), 20, "optimizer step")
    drawing.path([at(i + 1, y) for i, y in enumerate(steps)], "pale")
    drawing.path([at(i + 1, y) for i, y in enumerate(means)], "s0")
    words = {"gzip": "gzip -9, each document alone", "xz": "xz -9, one stream"}
    for number, (program, how) in enumerate(words.items()):
        y = at(0, found[program])[1]
        drawing.path([(LEFT, y), (LEFT + WIDE, y)], f"s{3 - number}")
        words_at = y + 16 - 22 * (number == 0)
        drawing.text(LEFT + WIDE - 8, words_at, f"{how}: {found[program]:.2f}", "note", end=True)
    x, y = at(len(steps), found["held_out"])
    drawing.rect(x - 4, y - 4, 8, 8, 1)
    drawing.text(x - 8, y + 4, f"{found['held_out']:.2f}", end=True)
    return drawing


def activation_pareto() -> Drawing:
    """Draw bytes kept against products repeated: setups, and policies that no other beats."""
    found = read("activation-pareto")
    name, every = found["preset"], found["all"]
    drawing = Drawing(760, f"{name}: activations kept against matrix products repeated, in %")
    most = 10 * math.ceil(max(x for x, _ in found["setups"].values()) / 10)

    def at(repeated: float, kept: float) -> Point:
        return LEFT + repeated / most * WIDE, TOP + HIGH * (1 - kept / 100)

    drawing.legend(LEFT, 12, [(0, "a policy for each kind"), (1, "one setup for all blocks")])
    scale(drawing, LEFT, TOP, HIGH, 100, "")
    drawing.text(14, TOP - 22, f"kept, % of {every} of a microbatch", "note")
    across(drawing, most, 10, "matrix products repeated, % of a forward")
    line: list[Point] = []
    for repeated, kept in found["front"]:
        x, y = at(max(0.0, repeated), kept)
        line += [(x, line[-1][1])] if line else []
        line.append((x, y))
    drawing.path(line, "s0")
    written: list[Point] = []
    for setup, (repeated, kept) in sorted(found["setups"].items(), key=lambda item: item[1]):
        x, y = at(max(0.0, repeated), kept)
        drawing.rect(x - 4, y - 4, 8, 8, 1)
        crowded = any(abs(x - there) < 150 and abs(y - high) < 15 for there, high in written)
        drawing.text(x + 8, y + (18 if crowded else -6), setup)
        written.append((x, y))
    return drawing


def published_steps() -> Drawing:
    """Draw predicted against measured seconds of published steps, both axes logarithmic."""
    found: dict[str, list[list[float]]] = read("published")
    shown = sorted(found, key=lambda source: -len(found[source]))
    groups = {source: found[source] for source in shown[:8]}
    groups["all others"] = [pair for source in shown[8:] for pair in found[source]]
    seconds = [s for pairs in found.values() for pair in pairs for s in pair]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    left, top, size = 64.0, 34.0, 440.0
    count = sum(map(len, found.values()))
    drawing = Drawing(760, f"{count} published steps: predicted against measured seconds")

    def along(value: float) -> float:
        return size * (math.log10(value) - low) / (high - low)

    drawing.rect(left, top, size, size, "back")
    for power in range(low, high + 1):
        d = along(10.0**power)
        drawing.path([(left + d, top), (left + d, top + size)], "pale")
        drawing.path([(left, top + d), (left + size, top + d)], "pale")
        drawing.text(left + d + 8, top + size + 18, f"{10.0**power:g}", "note", end=True)
        drawing.text(left - 8, top + size - d + 4, f"{10.0**power:g}", "note", end=True)
    drawing.path([(left, top + size), (left + size, top)], "line")
    drawing.text(left, top - 12, "predicted s", "note")
    drawing.text(left + size, top + size + 34, "measured s", "note", end=True)
    for number, (source, pairs) in enumerate(groups.items()):
        for measured, predicted in pairs:
            x, y = left + along(measured), top + size - along(predicted)
            drawing.rect(x - 2.5, y - 2.5, 5, 5, number)
        drawing.legend(left + size + 20, top + 24 * number, [(number, f"{source}: {len(pairs)}")])
    return drawing
