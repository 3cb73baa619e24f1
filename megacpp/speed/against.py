"""Compare a predicted step with what a run measured: its step times, and its profile if it has one.

    found = compare(predicted, Path("runs/a"))
    found.largest[0]        # ("products", 41.0, 55.2): part, predicted and measured ms

A profile is a trace of `--run.profile`. Kernels (on a CPU: operators, without what they call) are
sorted into parts by their names; what no kernel covers is idle time.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.errors import config_error
from megacpp.speed.step import StepTime

# Part of a kernel or operator by its name; the first match decides.
PARTS = (
    ("communication", r"nccl|gloo|c10d|all_?gather|reduce_?scatter|all_?reduce|all_?to_?all"),
    ("optimizer", r"adam|multi_tensor|_foreach|newton"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("recurrences", r"scan|mamba|recurren|m2rnn"),
    ("products", r"gemm|cutlass|cublas|::mm|addmm|::bmm|baddbmm|linear|nvjet|wgmma|matmul"),
)
OTHERS, IDLE = "memory-bound", "idle"
FIRST = 3  # steps that aren't typical


@dataclass(frozen=True)
class Compared:
    """Predicted beside measured.

    Attributes:
        step_ms: predicted and measured step; the measured one is the median.
        parts: predicted and measured ms by part; empty without a profile.
        source: file that was read.
    """

    step_ms: tuple[float, float]
    parts: dict[str, tuple[float, float]]
    source: str

    @property
    def largest(self) -> list[tuple[str, float, float]]:
        """The three parts that differ most."""
        order = sorted(self.parts.items(), key=lambda p: -abs(p[1][0] - p[1][1]))
        return [(name, *pair) for name, pair in order[:3]]


def compare(predicted: StepTime, folder: Path) -> Compared:
    """Return the comparison of a prediction with a run folder.

    Raises:
        ConfigError: the folder has neither steps nor a profile.
    """
    steps = measured_steps(folder)
    traces = sorted((folder / "profile").glob("*-rank-0.json.gz"))
    if not steps and not traces:
        rule = "has neither metrics.jsonl with steps nor a profile"
        raise config_error("against", folder, rule, "name the folder of a run")
    parts: dict[str, tuple[float, float]] = {}
    source, step = folder / "metrics.jsonl", 0.0
    if traces:
        source = traces[-1]
        found = profiled(json.loads(gzip.decompress(source.read_bytes()))["traceEvents"])
        step = sum(found.values())
        mine = grouped(predicted.parts)
        parts = {
            name: (1e3 * mine.get(name, 0.0), 1e3 * found.get(name, 0.0))
            for name in {**mine, **found}
        }
    if steps:
        step = statistics.median(steps[FIRST:] or steps)
    return Compared((1e3 * predicted.step_s, 1e3 * step), parts, str(source))


def measured_steps(folder: Path) -> list[float]:
    """Return the seconds of a run's steps, in order; none without metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [float(row["step_s"]) for row in rows if row.get("step_s")]


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """Return predicted seconds under the names that a profile distinguishes."""
    found: dict[str, float] = defaultdict(float)
    for name, time in parts.items():
        if name.startswith(("exposed", "slowed")):
            found["communication"] += time
        else:
            found[IDLE if name in ("bubble", "host") else name] += time
    return dict(found)


def profiled(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return seconds of a step by part, the mean of the steps of a trace.

    Communication counts where nothing else runs; gaps are `idle`.
    """
    rows = [e for e in events if e.get("ph") == "X" and "dur" in e]
    steps = [e for e in rows if re.fullmatch(r"step \d+", str(e.get("name")))]
    spans = {(e["ts"], e["ts"] + e["dur"]) for e in steps if e.get("cat") == "user_annotation"}
    kernels = [e for e in rows if e.get("cat") == "kernel"]
    work = _alone(kernels or [e for e in rows if e.get("cat") == "cpu_op"])
    found: dict[str, float] = defaultdict(float)
    for start, end in spans:
        covered = start
        inside = sorted((w for w in work if start <= w[0] < end), key=lambda w: w[:2])
        inside.sort(key=lambda w: w[2] == "communication")  # it counts where nothing else runs
        taken: list[tuple[float, float]] = []
        for at, until, part in inside:
            free = (until - at) - _overlap(taken, at, until) if part == "communication" else 0.0
            length = free if part == "communication" else until - at
            found[part] += max(0.0, length)
            if part != "communication":
                taken.append((at, until))
            covered += max(0.0, length)
        found[IDLE] += max(0.0, end - covered)
    return {name: time * 1e-6 / max(1, len(spans)) for name, time in found.items()}


def _alone(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """Return start, end and part of the innermost events, in microseconds."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event.get("tid")].append(event)
    found = []
    for rows in by_thread.values():
        rows.sort(key=lambda e: (e["ts"], -e["dur"]))
        for event, following in zip(rows, [*rows[1:], None], strict=True):
            end = event["ts"] + event["dur"]
            if following is None or following["ts"] >= end:  # it calls no other
                found.append((event["ts"], end, part_named(str(event["name"]))))
    return found


def _overlap(taken: Iterable[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in taken)


def part_named(name: str) -> str:
    """Return the part that a kernel or an operator belongs to."""
    for part, pattern in PARTS:
        if re.search(pattern, name, re.IGNORECASE):
            return part
    return OTHERS
