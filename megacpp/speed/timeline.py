"""Timeline of one rank's predicted step: spans by stream, as a trace for Perfetto and as SVG.

spans = timeline(work, gpu("H100"), Rates())
Path("step.json").write_text(chrome(spans))       # ui.perfetto.dev, chrome://tracing
Path("step.svg").write_text(svg(spans))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from megacpp.speed import collectives
from megacpp.speed.hardware import GpuSpec, Rates
from megacpp.speed.pipeline import schedule, spans_of
from megacpp.speed.step import (
    StepWork,
    optimizer_seconds,
    passes_of,
    predict,
    stage_times,
    unit_times,
)
from megacpp.speed.streams import COMPUTE, LINK, fsdp_tasks, run

WIDTH, LANE, LEFT = 1200, 44, 90  # of the SVG, in pixels
COLOURS = {"forward": "#4e79a7", "backward": "#f28e2b", "gather": "#59a14f", "reduce": "#b07aa1",
           "optimizer": "#e15759"}  # fmt: skip


class StreamSpan(NamedTuple):
    """Work of one stream.

    Attributes:
        stream: `compute` or `link`.
        name: what runs, its first word one of `COLOURS`, or a part of `StepTime`.
        start: seconds from the start of the step.
        seconds: its time.
    """

    stream: str
    name: str
    start: float
    seconds: float


# Parts that come after the microbatches, and their streams.
BEHIND = {"exposed data": LINK, "copied data": COMPUTE, "slowed by data": COMPUTE}


def timeline(step: StepWork, gpu: GpuSpec, rates: Rates) -> list[StreamSpan]:
    """Return the spans of a step: of the rank with most to do, in a pipeline.

    Collectives of the data axes in a pipeline, and those that no block overlaps, come after the
    microbatches, and so do FSDP2's copies and what kernels lose to communication beside them.
    Collectives inside a block are part of its span.
    """
    passes, parts = passes_of(step, gpu, rates), predict(step, gpu, rates).parts
    behind = dict(BEHIND)
    if step.stages:
        times = stage_times(step, passes)
        send = collectives.seconds("send", step.stage_bytes, step.axes["pp"], gpu)
        pp = step.axes["pp"].size
        actions = step.actions or schedule(step.schedule, pp, step.microbatches, len(times) // pp)
        kinds = {"F": "forward", "B": "backward", "I": "backward (inputs)",
                 "W": "backward (weights)"}  # fmt: skip
        ranks = spans_of(actions, times, send)
        own = max(ranks, key=lambda spans: sum(length for *_, length in spans))
        end = max(at + length for spans in ranks for _, at, length in spans)
        found = [
            StreamSpan(
                COMPUTE, f"{kinds[a.kind]} stage {a.stage} microbatch {a.microbatch}", at, length
            )
            for a, at, length in own
        ]
    else:
        units = unit_times(step, passes, gpu, rates)
        if step.data != "fsdp" or not step.overlapped or gpu.on_host:
            units = [unit._replace(gather=0.0, reduce=0.0) for unit in units]
        else:
            del behind["exposed data"]
        line = run(
            fsdp_tasks(
                units,
                step.microbatches,
                step.prefetch,
                step.reshard,
                step.reduce_each,
                step.resident,
            )
        )
        found = [
            StreamSpan(task.stream, task.name, start, task.seconds)
            for task, start in zip(line.tasks, line.starts, strict=True)
            if task.seconds
        ]
        end = max((span.start + span.seconds for span in found), default=0.0)
    for name, stream in behind.items():
        if name in parts:
            found.append(StreamSpan(stream, name, end, parts[name]))
            end += parts[name]
    return [*found, StreamSpan(COMPUTE, "optimizer", end, optimizer_seconds(step, gpu, rates))]


def chrome(spans: Sequence[StreamSpan]) -> str:
    """Return the spans in the JSON that Perfetto and chrome://tracing read."""
    streams = {COMPUTE: 0, LINK: 1}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": n, "args": {"name": stream}}
        for stream, n in streams.items()
    ]
    events += [
        {"ph": "X", "name": s.name, "cat": s.name.split()[0], "pid": 0, "tid": streams[s.stream],
         "ts": 1e6 * s.start, "dur": 1e6 * s.seconds}
        for s in spans
    ]  # fmt: skip
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def svg(spans: Sequence[StreamSpan]) -> str:
    """Return the spans as a picture: one lane for each stream."""
    end = max(s.start + s.seconds for s in spans)
    scale = (WIDTH - LEFT - 10) / end
    lanes = {COMPUTE: 10, LINK: 20 + LANE}
    parts = [
        f'<text x="4" y="{y + LANE / 2:.0f}" font-size="13">{name}</text>'
        for name, y in lanes.items()
    ]
    for s in spans:
        x, width = LEFT + s.start * scale, max(0.2, s.seconds * scale)
        colour = COLOURS.get(s.name.split()[0], "#bab0ac")
        parts.append(
            f'<rect x="{x:.2f}" y="{lanes[s.stream]}" width="{width:.2f}" height="{LANE}" '
            f'fill="{colour}"><title>{escape(s.name)}: {1e3 * s.seconds:.3f} ms</title></rect>'
        )
    foot = lanes[LINK] + LANE + 18
    for n in range(6):
        x = LEFT + (WIDTH - LEFT - 10) * n / 5
        anchor = "end" if n == 5 else "middle"
        parts.append(
            f'<text x="{x:.0f}" y="{foot}" font-size="12" text-anchor="{anchor}">'
            f"{1e3 * end * n / 5:,.1f} ms</text>"
        )
    for n, (name, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + n * 120, foot + 12
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 11}" font-size="12">{name}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 34}" '
        f'font-family="sans-serif">\n{body}\n</svg>\n'
    )
