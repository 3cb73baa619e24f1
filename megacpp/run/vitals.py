"""State of a run from its files alone, while it goes on; imports no torch.

Unlike a report, which refuses damaged records, this leaves out what can't be read: a line may be
torn in the moment of reading.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megacpp.outcome import STATUS, started_ticks, this_node
from megacpp.state.files import parsed, read_parsed

TAIL_BYTES = 1 << 16  # of a file that grows
LATE_S = 60.0  # without a new line a running run is worth a second look


def vitals(folder: Path) -> dict[str, Any]:
    """Return state, step, losses, speed, goodput, last checkpoint and stragglers of a run.

    Every value may be None, where the file is missing or can't be read.

    Args:
        folder: folder of the run.
    """
    status, config = read_parsed(folder / STATUS), read_parsed(folder / "config.json")
    lines = [line for line in _rows(folder / "metrics.jsonl") if type(line.get("step")) is int]
    last = lines[-1] if lines else {}
    steps = config.get("config", {}).get("run", {}).get("steps")
    found: dict[str, Any] = {
        "run": str(folder),
        "state": _state(folder, status),
        "code": status.get("code"),
        "message": status.get("message") or None,
        "host": status.get("host"),
        "step": last["step"] + 1 if last else None,
        "steps": steps if type(steps) is int else None,
        "age_s": _age(folder / "metrics.jsonl"),
        "losses": [x["loss"] for x in lines if isinstance(x.get("loss"), float)],
        "checkpoint": _latest(folder),
        "stragglers": sorted(set(_recent(folder, last.get("step", 0)))),
        "spent_s": _spent(folder / "goodput.jsonl"),
    }
    names = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "peak_bytes", "mfu", "skipped")
    found |= {name: last.get(name) for name in names}
    if found["step"] is not None and found["steps"] and isinstance(last.get("step_s"), float):
        pace = sorted(x["step_s"] for x in lines[-20:] if isinstance(x.get("step_s"), float))
        found["left_s"] = pace[len(pace) // 2] * (found["steps"] - found["step"])
    return found


def prometheus(found: dict[str, Any]) -> str:
    """Return vitals in Prometheus' text format."""
    numbers = {
        "up": float(found["state"] == "running"),
        **{name: found[name] for name in ("step", "steps", "loss", "grad_norm", "lr")},
        **{name: found[name] for name in ("tokens_per_s", "step_s", "peak_bytes", "mfu")},
        "seconds_since_step": found["age_s"],
        "exit_code": found["code"],
        "stragglers": len(found["stragglers"]),
    }
    lines = []
    for name, value in numbers.items():
        if isinstance(value, int | float):
            lines += [f"# TYPE megacpp_{name} gauge", f"megacpp_{name} {float(value):g}"]
    lines.append("# TYPE megacpp_seconds_total counter")
    lines += [
        f'megacpp_seconds_total{{class="{name}"}} {spent:g}'
        for name, spent in found["spent_s"].items()
    ]
    return "\n".join(lines) + "\n"


def _state(folder: Path, status: dict[str, Any]) -> str:
    """Return running, ended, or killed: status.json says running and its process is gone."""
    state = status.get("state")
    if state != "running":
        return "ended" if state == "ended" else "unknown"
    lease = read_parsed(folder / "run.lock")
    here = lease.get("node") == this_node()[0] and type(lease.get("pid")) is int
    return "killed" if here and started_ticks(lease["pid"]) != lease.get("ticks") else "running"


def _recent(folder: Path, step: int) -> Iterator[int]:
    """Yield stragglers of the last hundred steps."""
    for row in _rows(folder / "stragglers.jsonl"):
        whole = type(row.get("step")) is int and type(row.get("rank")) is int
        if whole and step - 100 <= row["step"] <= step:
            yield row["rank"]


def _spent(path: Path) -> dict[str, float]:
    """Return the last seconds of a run by class (goodput.py)."""
    spent: dict[str, float] = {}
    for row in _rows(path):
        for name, seconds in row["s"].items() if isinstance(row.get("s"), dict) else ():
            if isinstance(seconds, int | float):
                spent[name] = spent.get(name, 0.0) + seconds
    return spent


def _latest(folder: Path) -> str | None:
    with suppress(OSError, ValueError):
        text = (folder / "checkpoints/latest").read_text()[:200]
        return text.split()[0] if text.split() else None
    return None


def _age(path: Path) -> float | None:
    with suppress(OSError):
        return max(0.0, time.time() - path.stat().st_mtime)
    return None


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the last lines of a file."""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().split(b"\n")[int(size > TAIL_BYTES) :]
        return [*filter(None, map(parsed, lines))]
    return []
