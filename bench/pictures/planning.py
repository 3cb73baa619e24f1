"""Pictures of plans: memory against time, and a device's work against the bytes that it sends."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log2

from bench.pictures.memory import GIB, scale
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
    left, top, wide, high = 64.0, 62.0, 660.0, 260.0
    drawing.legend(left, 12, [(0, "tp 1, ep 1"), (1, "tp 1, ep 2 or 4"), (2, "tp 2"), (3, "tp 4")])
    columns = sorted({tokens for tokens, _ in found.values()})
    low, up = (log2(f(sent for _, sent in found.values())) for f in (min, max))

    def height(sent: float) -> float:
        return top + high * (1 - (log2(sent) - low + 0.4) / (up - low + 0.8))

    drawing.text(left - 8, top - 8, "GiB", "note", end=True)
    drawing.path([(left, top), (left, top + high), (left + wide, top + high)], "line")
    for power in range(int(low) + 1, int(up) + 1):
        drawing.path([(left - 4, height(2**power)), (left, height(2**power))], "line")
        drawing.text(left - 8, height(2**power) + 4, f"{2**power:,}", "note", end=True)
    gap = wide / len(columns)
    for i, tokens in enumerate(columns):
        x = left + i * gap
        drawing.text(x + gap / 2 - 18, top + high + 18, f"{tokens:,.0f}", "note")
        for (tp, ep, _), (_, sent) in (item for item in found.items() if item[1][0] == tokens):
            fill = {1: int(ep > 1), 2: 2, 4: 3}[tp]
            drawing.rect(x + 8, height(sent) - 3, gap - 16, 6, fill)
    drawing.text(left, top + high + 38, "Tokens of a microbatch that one device computes; upwards:"
                 " what it sends in a step, in doublings.", "note")  # fmt: skip
    return drawing
