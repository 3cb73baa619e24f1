"""Command `megacpp memory trace`: peak bytes of a training step on one rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp.cli.dry_run import RankArgs, readable
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.config.settings import setting
from megacpp.memory.budget import as_planned
from megacpp.memory.components import COMPONENTS
from megacpp.memory.stream import Stream
from megacpp.terminal.screen import check_writable, table, wrapped

if TYPE_CHECKING:
    from megacpp.memory.stream import StreamBlock

LARGEST = 8  # blocks shown
ROWS = 24  # moments shown: the fullest


@dataclass(frozen=True)
class StepPart:
    """Part of the step: the most bytes alive in it, and those at its end."""

    name: str
    peak: int
    end: int


@dataclass(frozen=True)
class Found:
    """Summary of a stream.

    Attributes:
        peak: bytes of all tensors at the fullest point.
        where: operation at that point.
        components: components of `peak`.
        resting: bytes between two steps.
        moments: parts of the step, in order.
        largest: blocks alive at the peak.
    """

    peak: int
    where: str
    components: dict[str, int]
    resting: int
    moments: tuple[StepPart, ...]
    largest: tuple[StreamBlock, ...]

    @classmethod
    def from_stream(cls, stream: Stream) -> Found:
        """Summarise a stream."""
        event, peak = stream.peak()
        alive = sorted((stream.blocks[n] for n in stream.alive_at(event)), key=lambda b: -b.bytes)
        by_component = stream.by_component(event)
        return cls(
            peak,
            stream.where(event),
            {name: by_component[name] for name in COMPONENTS if name in by_component},
            (stream.timeline() or [0])[-1],
            moments_of(stream),
            tuple(alive[:LARGEST]),
        )


def moments_of(stream: Stream) -> tuple[StepPart, ...]:
    """Return the non-empty parts of the step between two marks."""
    line = stream.timeline()
    ends = [start for start, _ in stream.marks[1:]] + [len(line)]
    return tuple(
        StepPart(name, max(line[start:end]), line[end - 1])
        for (start, name), end in zip(stream.marks, ends, strict=True)
        if start < end
    )


@dataclass(frozen=True)
class TraceArgs(RankArgs):
    """Rank of a mesh, and options of the trace."""

    full: bool = setting(False, "Run all layers, not one of each kind from which others follow.")
    timeline: str = setting(
        "", "File for PyTorch's memory viewer (https://pytorch.org/memory_viz)."
    )


def trace(args: TraceArgs, words: list[str]) -> int:
    """Peak bytes of a rank's tensors in an optimizer step, by component, tensor and part.

    Memory outside tensors (the device's context, the allocator's cache) isn't counted. The model of
    train.py runs without values, so this takes seconds for any model and mesh: in bf16 and with the
    kernels of a GPU, unless --train.device is cpu. Kernels that can't be traced (compiled
    FlexAttention, TileLang's) are replaced by torch's, and are named. Compiled
    blocks are the compiler's graphs, without its code.
    """
    size, rank = args.place
    config = parse_run(words, size).config
    timeline = check_writable("timeline", Path(args.timeline)) if args.timeline else None
    config = as_planned(config)
    from megacpp.cli.follow import following
    from megacpp.cli.trace import trace_step, traced_blocks

    with following("memory trace", traced_blocks(config, size, rank, args.full)):
        stream = trace_step(config, size, rank, args.full)
    found = Found.from_stream(stream)
    if timeline:
        from megacpp.memory.timeline import write_snapshot

        write_snapshot(stream, timeline)
    if args.json:
        print(json.dumps(args.as_dict(config) | _content(config, found), indent=2))
        return 0
    print("\n".join(_lines(args, config, found)))
    if timeline:
        print(f"\ntimeline: {timeline}")
    return 0


def _content(config: Config, found: Found) -> dict[str, Any]:
    """Return the report as JSON; all numbers are bytes, or ranks."""
    from parallel.simulate.traced_kernels import traced_kernels

    return {
        "kernels": asdict(traced_kernels(config)),
        "rows": config.train.device_batch_size,
        "seq_len": config.data.seq_len,
        **asdict(found),
    }


def _lines(args: TraceArgs, config: Config, found: Found) -> list[str]:
    """Return the report as text."""
    from megacpp.cli.measure import coordinates
    from parallel.simulate.traced_kernels import traced_words

    rows = [["alive at once", "bytes", "share"]]
    rows += [
        [name, readable(count), f"{count / max(1, found.peak):.1%}"]
        for name, count in found.components.items()
    ]
    rows.append(["sum", readable(found.peak), ""])
    largest = [["largest tensors then", "of", "bytes"]]
    largest += [[b.name, b.part, readable(b.bytes)] for b in found.largest]
    return [
        *args.lines(config, coordinates(config.mesh, *args.place)),
        *wrapped(f"kernels: {traced_words(config)}"),
        *wrapped(
            f"most at once: {readable(found.peak)}, in {found.where or 'nothing'}; "
            f"between steps: {readable(found.resting)}"
        ),
        "",
        *table(rows),
        "",
        *table(largest, 2),
        "",
        *_moments(found),
    ]


def _moments(found: Found) -> list[str]:
    """Return the fullest parts of the step, in order."""
    fullest = sorted(found.moments, key=lambda m: -m.peak)[:ROWS]
    least = min((m.peak for m in fullest), default=0)
    shown = [m for m in found.moments if m.peak >= least][:ROWS]
    rows = [["part of the step", "most", "at its end"]]
    rows += [[m.name, readable(m.peak), readable(m.end)] for m in shown]
    hidden = len(found.moments) - len(shown)
    return [*table(rows), *([f"and {hidden} with less"] if hidden else [])]
