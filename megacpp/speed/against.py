"""Compare a predicted step with what a run measured: its step times, and its profile if it has one.

    found = compare(predicted, Path("runs/a"))
    found.largest[0]        # ("products", 41.0, 55.2): part, predicted and measured ms

A profile is a trace of `--run.profile`. Kernels (on a CPU: operators, without what they call) are
sorted into parts by their names; what no kernel covers is idle time.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
REPAIR = "name the folder of another run, or remove the damaged file"


@dataclass(frozen=True)
class MeasuredRun:
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
        """Three parts that differ most, with predicted and measured ms."""
        order = sorted(self.parts.items(), key=lambda p: -abs(p[1][0] - p[1][1]))
        return [(name, *pair) for name, pair in order[:3]]


def compare(predicted: StepTime, folder: Path) -> MeasuredRun:
    """Return the comparison of a prediction with a run folder.

    Raises:
        ConfigError: the folder has neither steps nor a profile, or a file can't be read.
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
        found = profiled_file(source)
        step = sum(found.values())
        mine = grouped(predicted.parts)
        parts = {
            name: (1e3 * mine.get(name, 0.0), 1e3 * found.get(name, 0.0))
            for name in {**mine, **found}
        }
    if steps:
        step = statistics.median(usual_steps(steps))
    return MeasuredRun((1e3 * predicted.step_s, 1e3 * step), parts, str(source))


def usual_steps(steps: Sequence[float]) -> Sequence[float]:
    """Return the seconds of steps without the first ones, which compile, allocate and connect."""
    return steps[FIRST:] or steps


def measured_steps(folder: Path) -> list[float]:
    """Return the seconds of a run's steps, in order; none without metrics.jsonl.

    A last line that isn't whole, as a run that writes leaves it, is skipped.

    Raises:
        ConfigError: another line isn't a record of a step.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    found: list[float] = []
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            seconds = json.loads(line).get("step_s") or 0.0
            if not 0 <= seconds < math.inf:
                raise ValueError(f"step_s={seconds} is no number of seconds")
        except (ValueError, AttributeError, TypeError) as error:
            if number == len(lines) and isinstance(
                error, json.JSONDecodeError | UnicodeDecodeError
            ):
                break
            rule = f"line {number} of metrics.jsonl can't be read ({error})"
            raise config_error("against", folder, rule, REPAIR) from None
        found += [float(seconds)] if seconds else []
    return found


def profiled_file(path: Path) -> dict[str, float]:
    """Return `profiled` of a compressed trace.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        found = profiled(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
        if not sum(found.values()):
            raise ValueError("no step is in it")
        return found
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as e:
        rule = f"its profile {path.name} can't be read ({e})"
        raise config_error("against", path.parent.parent, rule, REPAIR) from None


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """Return predicted seconds under the names that a profile distinguishes."""
    found: dict[str, float] = defaultdict(float)
    for name, time in parts.items():
        if name.startswith(("exposed", "slowed")):
            found["communication"] += time
        elif name.startswith("copied"):
            found[OTHERS] += time
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
    work = [(e["ts"], e["dur"], str(e["name"])) for e in kernels]
    work = work or _own([e for e in rows if e.get("cat") == "cpu_op"])
    found: dict[str, float] = defaultdict(float)
    for start, end in spans:
        inside = [w for w in work if start <= w[0] < end]
        busy = [(at, at + length) for at, length, name in inside if not _sends(name)]
        covered = 0.0
        for at, length, name in inside:
            if _sends(name):
                length -= sum(max(0.0, min(at + length, b) - max(at, a)) for a, b in busy)
            found[part_named(name)] += max(0.0, length)
            covered += max(0.0, length)
        found[IDLE] += max(0.0, end - start - covered)
    return {name: time * 1e-6 / max(1, len(spans)) for name, time in found.items()}


def _own(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """Return start, time without the operators that it calls, and name of torch's operators."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event.get("tid")].append(event)
    found = []
    for rows in by_thread.values():
        rows.sort(key=lambda e: (e["ts"], -e["dur"]))
        own = [float(e["dur"]) for e in rows]
        open_: list[int] = []
        for number, event in enumerate(rows):
            while open_ and rows[open_[-1]]["ts"] + rows[open_[-1]]["dur"] <= event["ts"]:
                open_.pop()
            if open_:
                own[open_[-1]] -= event["dur"]
            open_.append(number)
        found += [
            (float(e["ts"]), max(0.0, time), str(e["name"]))
            for e, time in zip(rows, own, strict=True)
            if str(e["name"]).startswith(("aten::", "c10d::", "_c10d"))
        ]
    return found


def _sends(name: str) -> bool:
    return part_named(name) == "communication"


def part_named(name: str) -> str:
    """Return the part that a kernel or an operator belongs to."""
    for part, pattern in PARTS:
        if re.search(pattern, name, re.IGNORECASE):
            return part
    return OTHERS
