"""Picture of a plan: memory against time of all configurations that fit."""

from __future__ import annotations

from bench.pictures.memory import GIB, scale
from bench.pictures.svg import Drawing
from megacpp.cli.plan_order import mesh_words
from megacpp.cli.speed import predicted
from megacpp.config.presets import hybrid_400m
from megacpp.memory.planner import plan
from megacpp.speed.hardware import gpu

WORLD, MEMORY, HEADROOM, TOKENS = 8, 80, 0.1, 1 << 19


def plan_front() -> Drawing:
    """Draw the candidates of a plan by GiB of a rank and ms of a step, joining the best."""
    points = []
    for one in plan(hybrid_400m(), WORLD, int(MEMORY * (1 - HEADROOM) * GIB), TOKENS).candidates:
        ms = 1e3 * predicted(one.config, WORLD, gpu("H100")).step_s
        points.append((one.estimate.point / GIB, ms, one.config))
    points.sort(key=lambda point: point[:2])
    most_gib, most_ms = points[-1][0], max(ms for _, ms, _ in points)
    left, top, wide, high = 64.0, 62.0, 660.0, 280.0
    drawing = Drawing(
        760,
        f"{len(points)} ways to train hybrid_400m on 8 H100: GiB of a rank against ms of a step",
    )

    def at(gib: float, ms: float) -> tuple[float, float]:
        return left + gib / most_gib * wide, top + high * (1 - ms / most_ms)

    rows = sorted({config.train.device_batch_size for _, _, config in points})
    drawing.legend(left, 12, [("edge", "none is both smaller and faster")])
    scale(drawing, left, top, high, most_ms, "ms")
    drawing.path([(left, top + high), (left + wide, top + high)], "line")
    for gib in range(0, int(most_gib) + 1, 5):
        x, y = at(gib, 0)
        drawing.path([(x, y), (x, y + 4)], "line")
        drawing.text(x + (8 if gib > 9 else 4), y + 18, f"{gib}", "note", end=True)
    drawing.text(left + wide, top + high + 18, "GiB", "note", end=True)
    best: list[tuple[float, float]] = []
    fastest = most_ms + 1
    for gib, ms, config in points:
        x, y = at(gib, ms)
        count = config.train.device_batch_size
        drawing.rect(x - 3, y - 3, 6, 6, rows.index(count))
        if ms < fastest:
            fastest = ms
            best += [(x, best[-1][1])] if best else []
            best.append((x, y))
    drawing.path(best, "edge")
    for i, count in enumerate(rows):
        of_count = [point for point in points if point[2].train.device_batch_size == count]
        gib, ms, config = min(of_count, key=lambda point: point[1])
        name = f"{count} row{'s' * (count > 1)} at a time, the fastest: "
        name += f"{mesh_words(config.mesh)}, {gib:.1f} GiB, {ms:,.0f} ms"
        drawing.legend(left, top + high + 36 + 20 * i, [(i, name)])
    return drawing
