"""Pictures of what one rank does to compute with sharded weights: FSDP2's gathers, and tp's."""

from __future__ import annotations

from dataclasses import replace

from bench.pictures.svg import Drawing
from megacpp.cli.trace import trace_step
from megacpp.config.arguments import parse_run
from parallel.local_shapes import own_shape
from parallel.simulate.drawing import BACKWARD, FORWARD, draw
from parallel.simulate.fake import fake_world, planned_model

KIB = 1024
FSDP = (
    "tiny --train.device cpu --mesh.dp-shard 4 --mesh.reshard always --model.pattern AF"
    " --model.depth 4 --train.device-batch-size 2 --train.grad-accum 1 --data.seq-len 64"
)
TENSOR = "tiny --train.device cpu --mesh.tp 2 --model.pattern AF --model.depth 2"
UNITS = {
    "embed": "embed",
    "blocks.0": "A",
    "blocks.1": "F",
    "blocks.2": "A",
    "blocks.3": "F",
    "head": "head",
}
# What FSDP2 allocates, by the operator: fill, place in a unit's row, name.
KINDS = {
    "all_gather_copy_in": (6, 0, "gather's buffer"),
    "split_with_sizes_copy": (0, 1, "whole weights"),
    "chunk_cat": (2, 0, "whole gradients, to be scattered"),
}


def fsdp_timeline() -> Drawing:
    """Draw when the weights and gradients of each unit are whole during one step."""
    stream = trace_step(parse_run(FSDP.split(), 4).config, 4, full=True)
    spans: dict[int, list[int]] = {}
    for event, at in enumerate(stream.events):
        spans.setdefault(at, []).append(event)
    marks = [(event, mark.split()) for event, mark in stream.marks]

    def unit(event: int) -> str:
        return [words[-1] for begin, words in marks if begin <= event][-1]

    found = []
    for at, (begin, *end) in spans.items():
        kind, size = stream.blocks[at].name.split()[0], stream.blocks[at].bytes
        if kind in KINDS and stream.blocks[at].component == "communication" and size > 8 * KIB:
            found.append((begin, end[0] if end else len(stream.events), kind, size))
    first = min(begin for begin, *_ in found) - 4
    last = next(e for e, words in marks if words[0] in ("clip", "optimizer"))
    left, top, wide, row = 96.0, 64.0, 640.0, 46.0
    scale = wide / (last - first)
    drawing = Drawing(760, "When each unit is whole on a rank of dp_shard 4, over one step")
    drawing.legend(left, 12, [(fill, name) for fill, _, name in KINDS.values()])
    for i, (name, kind) in enumerate(UNITS.items()):
        y = top + i * row
        drawing.text(14, y + 22, name, "head")
        if kind != name:
            drawing.text(76, y + 22, kind, "note")
        drawing.rect(left, y, wide, row - 6, "off")
    for begin, end, kind, size in found:
        # A buffer is of the unit whose weights are split from it next.
        after = min(
            (b for b, _, k, _ in found if k == "split_with_sizes_copy" and b > begin), default=begin
        )
        name = unit(after if kind == "all_gather_copy_in" else begin)
        fill, place, _ = KINDS[kind]
        y = top + list(UNITS).index(name) * row + place * 20
        width = max(2.0, (min(end, last) - begin) * scale)
        words = f"{size / KIB:.0f} KiB" if width > 54 and place == 0 else ""
        drawing.rect(left + (begin - first) * scale, y + 1, width, 18, fill, words)
    bottom = top + len(UNITS) * row
    for word in (FORWARD, BACKWARD):
        event = next(e for e, words in marks if words[0] == word)
        x = left + (event - first) * scale
        drawing.path([(x, top - 8), (x, bottom)], "line")
        drawing.text(x + 4, top - 10, word, "note")
    drawing.text(left, bottom + 12, "One column is one allocation: order, not seconds.", "note")
    return drawing


def tensor_blocks() -> Drawing:
    """Draw an attention and a dense block on a rank of tp 2: layouts, shapes and bytes sent."""
    config = parse_run(TENSOR.split(), 2).config
    with fake_world(config, 2, 1) as world:
        held = {n: own_shape(p) for n, p in planned_model(config, world).named_parameters()}
    drawn = draw(replace(config), 2, 1, again=False)
    drawing = Drawing(
        760, "An attention and a dense block on rank 1 of tp 2: layouts, weights, bytes"
    )
    y = 22.0
    for i, (kind, calls) in enumerate(drawn.items()):
        name = {"A": "A, attention", "F": "F, dense"}[kind[0]]
        drawing.text(14, y, name, "head")
        weights = [
            f"{n.split('.')[-2]} {shape[0]} x {shape[1]}"
            for n, shape in held.items()
            if n.startswith(f"blocks.{i}.") and len(shape) == 2
        ]
        for phase, fill in ((FORWARD, 0), (BACKWARD, 1)):
            gather, scatter = [c for c in calls if c.phase == phase and c.axis == "tp"]
            (before, whole), (partial, after) = (c.picture.split(" -> ") for c in (gather, scatter))
            drawing.text(14, y + 40, phase, "note")
            x = 90.0
            for words, call in ((before, gather), (whole, None), (partial, scatter), (after, None)):
                drawing.rect(x, y + 22, 104, 26, fill, words)
                if call is not None:
                    label = f"{call.kind}\n{call.bytes / KIB:.0f} KiB"
                    drawing.arrow(x + 106, y + 40, x + 178, label)
                elif words == whole:
                    drawing.arrow(x + 106, y + 35, x + 146, "block")
                x += 180 if call is not None else 148
            y += 62
        drawing.text(90, y + 8, "weights of this rank: " + ", ".join(weights), "note")
        y += 44
    return drawing
