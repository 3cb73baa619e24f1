"""Command `megacpp watch`: runs live in the terminal, from their files alone."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.config.settings import setting
from megacpp.report.files import runs_among
from megacpp.run.vitals import LATE_S, vitals
from megacpp.terminal.screen import columns, duration

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class WatchArgs:
    """Runs to watch."""

    run: tuple[str, ...] = setting(words="Folders of runs.", positional=True)
    every: float = setting(2.0, "Time between two looks.", "seconds", at_least=0.1, at_most=3600)
    once: bool = setting(False, "Print the runs as they are now and leave.")
    json: bool = setting(False, "Look once, print one JSON object a run.")


def watch(args: WatchArgs) -> int:
    """Show runs live: state, step, loss, speed, remaining time, last checkpoint, stragglers.

    Only files of the run folders are read, so runs on other machines can be watched over a shared
    file system. A run whose process was killed is said to be. The command ends when all runs have,
    or on Ctrl-C.
    """
    folders = runs_among([Path(word) for word in args.run])
    live = sys.stdout.isatty() and not args.once
    drawn = 0
    while True:
        found = [vitals(folder) for folder in folders]
        if args.json:
            for one in found:
                print(json.dumps(one))
            return 0
        lines = [line for one in found for line in lines_of(one)]
        if live:
            lines = [line[: columns()] for line in lines]  # a wrapped line would take two rows
            sys.stdout.write(f"\x1b[{drawn}A\x1b[J" if drawn else "")  # over the lines before
        print("\n".join(lines), flush=True)
        drawn = len(lines)
        if args.once or all(one["state"] in ("ended", "killed") for one in found):
            return 0
        time.sleep(args.every)


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return two or three lines about a run."""
    state = found["state"]
    if state == "ended" and found["code"] is not None:
        state = f"ended with {found['code']}"
    age_s = found["age_s"] or 0.0
    late = age_s > LATE_S and state == "running"
    since = f", no step for {duration(age_s)}" if late else ""
    first = f"{found['run']}: {state}{since}"
    if found["step"] is None:
        return [first + (f": {found['message']}" if found["message"] else "")]
    of = f"/{found['steps']}" if found["steps"] else ""
    parts = [f"step {found['step']}{of}"]
    parts += [f"loss {found['loss']:.4f}"] if isinstance(found["loss"], float) else []
    parts += [f"{found['tokens_per_s']:,.0f} tok/s"] if found["tokens_per_s"] else []
    left_s = found.get("left_s")
    if state == "running" and left_s is not None:
        parts.append(f"eta {duration(left_s)}")
    parts += [f"saved {found['checkpoint']}"] if found["checkpoint"] else []
    lines = [first, f"  {sparkline(found['losses'])}  {'  '.join(parts)}"]
    if found["stragglers"]:
        ranks = ", ".join(map(str, found["stragglers"]))
        lines.append(f"  stragglers: ranks {ranks}")
    if found["message"] and found["code"]:
        lines.append(f"  {found['message']}")
    return lines


def sparkline(losses: list[float], width: int = 24) -> str:
    """Return the course of losses as a row of bars; values that aren't finite are gaps."""
    size = max(1, math.ceil(len(losses) / width))
    means = []
    for at in range(0, len(losses), size):
        some = [x for x in losses[at : at + size] if math.isfinite(x)]
        means.append(sum(some) / len(some) if some else math.nan)
    known = [x for x in means if math.isfinite(x)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    scale = (len(BARS) - 1) / (high - low or 1.0)
    return "".join(BARS[round((x - low) * scale)] if math.isfinite(x) else " " for x in means)
