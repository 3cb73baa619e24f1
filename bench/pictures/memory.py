"""Pictures of memory: over one step, and over the length of the context."""

from __future__ import annotations

from itertools import pairwise

from bench.pictures.charts import Axes, Point, ticks
from bench.pictures.svg import Drawing
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from megacpp.memory.budget import as_planned
from megacpp.memory.components import COMPONENTS
from megacpp.memory.estimate import estimate

MIB, GIB = 1 << 20, 1 << 30
STEP = "tiny --train.device cpu --mesh.tp 2 --train.device-batch-size 8 --train.grad-accum 1"
ROWS = "nam56r_base --mesh.tp 2 --mesh.ep 4 --train.device-batch-size 1"  # in four replicas
LENGTHS = (4096, 8192, 16384, 32768)
# Components with a fill of their own, from below; all others are one layer on top.
FILLS = {
    "parameters": 0,
    "optimizer_state": 6,
    "gradients": 2,
    "activations": 1,
    "moe_routing": 3,
    "head_loss": 4,
    "workspace": 5,
    "communication": 7,
    "muon_transient": 9,
    "other": 8,
}


def layer_of(component: str) -> str:
    """Return the layer that shows a component, such as `activations/M scan`."""
    name = component.split("/")[0]
    return name if name in FILLS else "other"


def memory_of_a_step() -> Drawing:
    """Draw the bytes alive during one step, stacked by component."""
    config = parse_run(STEP.split(), 2).config
    stream = trace_step(config, 2, full=True)
    layers = {name: 0 for name in FILLS}
    rows: list[tuple[int, ...]] = []
    alive: set[int] = set()
    for at in stream.events:
        block = stream.blocks[at]
        name = layer_of(block.component)
        layers[name] += -block.bytes if at in alive else block.bytes
        alive ^= {at}
        rows.append(tuple(layers.values()))
    most = max(map(sum, rows))
    wide = 660
    drawing = Drawing(
        760, f"Bytes alive during one step of tiny on rank 0 of 2, {most / MIB:.0f} MiB"
    )
    used = [name for i, name in enumerate(FILLS) if max(row[i] for row in rows) > most / 500]
    axes = Axes(drawing, 64, 70, wide, 250, (0, wide), (0, most / MIB))
    axes.frame([], ticks(most / MIB), ("", "MiB"))
    half = (len(used) + 1) // 2
    for line, names in enumerate((used[:half], used[half:])):
        drawing.legend(64, 12 + 20 * line, [(FILLS[n], n.replace("_", " ")) for n in names])
    # One column of pixels shows the fullest moment of the events that fall on it.
    ends = [i * len(rows) // wide for i in range(wide + 1)]
    columns = [max(rows[a : max(b, a + 1)], key=sum) for a, b in pairwise(ends)]
    below = [0.0] * wide
    for i, name in enumerate(FILLS):
        above = [b + column[i] for b, column in zip(below, columns, strict=True)]
        if name in used:
            edge, base = ([axes.at(x, y / MIB) for x, y in enumerate(ys)] for ys in (above, below))
            drawing.path([*thinned(edge), *reversed(thinned(base))], FILLS[name], close=True)
        below = above
    seen: list[str] = []
    for event, mark in stream.marks:
        word = mark.split()[0]
        if word not in seen and word in ("forward", "backward", "optimizer"):
            seen.append(word)
            x, bottom = axes.at(event / len(rows) * wide, 0)
            drawing.path([(x, axes.top), (x, bottom + 6)], "line")
            drawing.text(x + 4, bottom + 18, word, "note")
    return drawing


def thinned(points: list[Point]) -> list[Point]:
    """Return a line without the points that lie within a run of one height."""
    kept = [points[0]]
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        if not before[1] == here[1] == after[1]:
            kept.append(here)
    return [*kept, points[-1]]


def buckets_over_context() -> Drawing:
    """Draw the estimate of a rank of eight by bucket, for rows of 4K to 32K tokens."""
    found = {}
    for length in LENGTHS:
        one_microbatch = ["--train.tokens-per-step", str(4 * length), "--data.seq-len", str(length)]
        config = parse_run([*ROWS.split(), *one_microbatch], 8).config
        found[length] = estimate(as_planned(config), 8)
    stacks = {length: dict.fromkeys(FILLS, 0) for length in LENGTHS}
    for length, one in found.items():
        for name, size in one.components.items():
            stacks[length][layer_of(name)] += size
    most = max(sum(stack.values()) for stack in stacks.values()) / GIB
    drawing = Drawing(760, "Memory of a rank of nam56r_base by bucket, rows of 4K to 32K tokens")
    axes = Axes(drawing, 64, 70, 670, 260, (0, len(LENGTHS)), (0, most))
    axes.frame([], ticks(most), ("", "GiB"))
    for line, names in enumerate((list(FILLS)[:5], list(FILLS)[5:])):
        drawing.legend(64, 12 + 20 * line, [(FILLS[n], n.replace("_", " ")) for n in names])
    for i, (length, stack) in enumerate(stacks.items()):
        x, y = axes.at(i + 0.25, 0)
        drawing.text(x + 8, y + 18, f"{length // 1024}K tokens")
        for name, size in stack.items():
            h = size / GIB / most * axes.high
            y -= h
            drawing.rect(x, y, 90, h, FILLS[name], f"{size / GIB:.1f}" if h > 13 else "")
        drawing.text(x + 6, y - 6, f"{sum(stack.values()) / GIB:.1f} GiB", "head")
    assert set(FILLS) - {"other"} <= set(COMPONENTS)
    return drawing
