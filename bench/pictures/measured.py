"""Pictures of what was measured once: a loss, recomputation, published steps (docs/*.json)."""

from __future__ import annotations

import json
import math
from typing import Any

from bench.pictures.charts import Axes, Point, ticks
from bench.pictures.svg import Drawing
from bench.reference import ROOT


def read(name: str) -> Any:
    """Return what a file of docs holds."""
    return json.loads((ROOT / f"docs/{name}.json").read_text())


def tiny_loss() -> Drawing:
    """Draw bits per byte of the steps of `make train`, held-out text, gzip and xz."""
    found = read("tiny-loss")
    steps = found["bits_per_byte"]
    title = f"Bits per byte of {len(steps)} steps of tiny, of held-out text, and of gzip and xz"
    drawing, most = Drawing(760, title), math.ceil(2 * max(steps)) / 2
    axes = Axes(drawing, 64, 62, 660, 250, (0, len(steps)), (0, most))
    last = [steps[max(0, i - 9) : i + 1] for i in range(len(steps))]
    means = [sum(ten) / len(ten) for ten in last]
    names: list[tuple[int | str, str]] = [("line", "a step"), (0, "mean of ten"), (1, "held out")]
    drawing.legend(64, 12, names)
    axes.frame(range(0, len(steps) + 1, 20), ticks(most), ("optimizer step", "bits per byte"))
    axes.line(enumerate(steps, 1), "line")
    axes.line(enumerate(means, 1), "s0")
    words = {"gzip": "gzip -9, each document alone", "xz": "xz -9, one stream"}
    for number, (program, how) in enumerate(words.items()):
        axes.line([(0, found[program]), (len(steps), found[program])], f"s{3 - number}")
        x, y = axes.at(len(steps), found[program])
        words_at = y + 16 - 22 * (number == 0)
        drawing.text(x - 8, words_at, f"{how}: {found[program]:.2f}", "note", end=True)
    x, y = axes.dot(len(steps), found["held_out"], 1)
    drawing.text(x - 8, y + 4, f"{found['held_out']:.2f}", end=True)
    return drawing


def activation_pareto() -> Drawing:
    """Draw bytes kept against products repeated: setups, and policies that no other beats."""
    found = read("activation-pareto")
    name, every = found["preset"], found["all"]
    drawing = Drawing(760, f"{name}: activations kept against matrix products repeated, in %")
    most = 10 * math.ceil(max(x for x, _ in found["setups"].values()) / 10)
    axes = Axes(drawing, 64, 62, 660, 260, (0, most), (0, 110))
    drawing.legend(64, 12, [(0, "a policy for each kind"), (1, "one setup for all blocks")])
    names = "matrix products repeated, % of a forward", f"kept, % of {every} of a microbatch"
    axes.frame(range(0, most + 1, 10), ticks(100), names)
    line: list[Point] = []
    for repeated, kept in found["front"]:
        x = max(0.0, repeated)
        line += [(x, line[-1][1])] if line else []
        line.append((x, kept))
    axes.line(line, "s0")
    written: list[Point] = []
    for setup, (repeated, kept) in sorted(found["setups"].items(), key=lambda item: item[1]):
        x, y = axes.dot(max(0.0, repeated), kept, 1)
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
    powers = range(math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds))) + 1)
    decades = [10.0**power for power in powers]
    count = sum(map(len, found.values()))
    drawing = Drawing(760, f"{count} published steps: predicted against measured seconds")
    ends = decades[0], decades[-1]
    axes = Axes(drawing, 64, 34, 440, 440, ends, ends, log="xy")
    axes.frame(decades, decades, ("measured s", "predicted s"))
    axes.line([(ends[0], ends[0]), (ends[1], ends[1])], "line")
    for number, (source, pairs) in enumerate(groups.items()):
        for measured, predicted in pairs:
            axes.dot(measured, predicted, number, 5)
        drawing.legend(524, 34 + 24 * number, [(number, f"{source}: {len(pairs)}")])
    return drawing
