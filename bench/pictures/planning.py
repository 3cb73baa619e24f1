"""Pictures of plans: memory against time, and a device's work against the bytes that it sends."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil, log2

from bench.pictures.charts import Axes, Point, ticks
from bench.pictures.memory import GIB
from bench.pictures.svg import Drawing
from megacpp.cli.plan_order import mesh_words
from megacpp.cli.speed import predicted
from megacpp.config.checks.every import resolve
from megacpp.config.presets import hybrid_400m, nam56r_base
from megacpp.memory.planner import device_tokens, plan
from megacpp.memory.traffic import traffic
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
    drawing = Drawing(
        760,
        f"{len(points)} ways to train hybrid_400m on 8 H100: GiB of a rank against ms of a step",
    )
    axes = Axes(drawing, 64, 62, 660, 280, (0, most_gib), (0, most_ms))
    drawing.legend(64, 12, [("edge", "none is both smaller and faster")])
    axes.frame(range(0, int(most_gib) + 1, 5), ticks(most_ms), ("GiB", "predicted ms"))
    rows = sorted({config.train.device_batch_size for _, _, config in points})
    best: list[Point] = []
    fastest = most_ms + 1
    for gib, ms, config in points:
        axes.dot(gib, ms, rows.index(config.train.device_batch_size), 6)
        if ms < fastest:
            best += [(gib, fastest)] if best else []
            best.append((gib, ms))
            fastest = ms
    axes.line(best, "edge")
    for i, count in enumerate(rows):
        of_count = [point for point in points if point[2].train.device_batch_size == count]
        gib, ms, config = min(of_count, key=lambda point: point[1])
        name = f"{count} row{'s' * (count > 1)} at a time, the fastest: "
        name += f"{mesh_words(config.mesh)}, {gib:.1f} GiB, {ms:,.0f} ms"
        drawing.legend(64, 396 + 20 * i, [(i, name)])
    return drawing


def same_work_more_bytes() -> Drawing:
    """Draw 36 configurations: a device's tokens of a microbatch, and the GiB that it sends."""
    base = nam56r_base()
    found: dict[tuple[int, int, int], tuple[float, float]] = {}
    for tp, ep, rows in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        mesh = replace(base.mesh, tp=tp, ep=ep)
        train = replace(base.train, device_batch_size=tp * rows, tokens_per_step=1 << 20)
        config = resolve(replace(base, mesh=mesh, train=train), WORLD)
        tokens = device_tokens(config, config.mesh, tp * rows)
        found[tp, ep, rows] = tokens, traffic(config, WORLD).bytes / GIB
    drawing = Drawing(
        760, "Ways to train nam56r_base on 8 devices: for the same work tp and ep send more bytes"
    )
    drawing.legend(64, 12, [(0, "tp 1, ep 1"), (1, "tp 1, ep 2 or 4"), (2, "tp 2"), (3, "tp 4")])
    columns = sorted({tokens for tokens, _ in found.values()})
    low, up = (f(sent for _, sent in found.values()) for f in (min, max))
    ends = (0, len(columns)), (low / 1.3, up * 1.3)
    axes = Axes(drawing, 64, 62, 660, 260, *ends, log="y")
    doublings = [2**power for power in range(ceil(log2(low)), int(log2(up)) + 1)]
    axes.frame([], doublings, ("tokens of a microbatch that one device computes", "GiB in a step"))
    for (tp, ep, _), (tokens, sent) in found.items():
        x, y = axes.at(columns.index(tokens), sent)
        fill = {1: int(ep > 1), 2: 2, 4: 3}[tp]
        drawing.rect(x + 8, y - 3, axes.wide / len(columns) - 16, 6, fill)
    for i, tokens in enumerate(columns):
        x, y = axes.at(i + 0.5, axes.y[0])
        drawing.text(x - 18, y + 18, f"{tokens:,.0f}", "note")
    return drawing
