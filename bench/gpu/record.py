"""Record of GPU measurements: rows that are written at once, and the tables made of them."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megacpp.kernels.host import installed
from megacpp.launch.record import device_name, driver_version, git_commit
from megacpp.run.metrics import duration
from megacpp.state.files import write_json

Row = dict[str, Any]
# Columns of each section: key of a row, heading, format.
COLUMNS: dict[str, Sequence[tuple[str, str, str]]] = {
    "models": (
        ("name", "model", ""),
        ("mode", "mode", ""),
        ("parameters", "parameters", ",d"),
        ("tokens_per_s", "tokens/s", ",.0f"),
        ("tflops", "TFLOP/s", ".1f"),
        ("pass_tflops", "of a pass", ".1f"),
        ("mfu", "MFU", ".1%"),
        ("step_s", "step s", ".4f"),
        ("optimizer_s", "optimizer s", ".4f"),
        ("muon_share", "Muon, of all FLOPs", ".1%"),
        ("first_s", "first step s", ".1f"),
        ("allocated_gib", "peak GiB", ".3f"),
        ("reserved_gib", "reserved", ".3f"),
        ("estimate_gib", "estimate", ".3f"),
        ("estimate_off", "off", "+.2%"),
        ("upper_held", "below upper", ""),
    ),
    "kernels": (
        ("name", "operation", ""),
        ("mode", "backend", ""),
        ("shape", "tokens", ""),
        ("dtype", "dtype", ""),
        ("forward_ms", "forward ms", ".3f"),
        ("both_ms", "and backward", ".3f"),
        ("output_error", "output off", ".1e"),
        ("gradient_error", "gradients off", ".1e"),
    ),
    "recompute": (
        ("name", "model", ""),
        ("mode", "policy", ""),
        ("pass_s", "pass s", ".4f"),
        ("kept_gib", "kept GiB", ".3f"),
        ("peak_gib", "peak GiB", ".3f"),
        ("time_ratio", "time", ".2f"),
        ("peak_ratio", "peak", ".2f"),
        ("front", "on the front", ""),
    ),
    "estimator": (
        ("name", "point", ""),
        ("allocated_gib", "peak GiB", ".3f"),
        ("tensors_gib", "tensors, estimate", ".3f"),
        ("tensors_off", "off", "+.2%"),
        ("total_gib", "in use GiB", ".3f"),
        ("estimate_gib", "estimate", ".3f"),
        ("estimate_off", "off", "+.2%"),
        ("upper_held", "below upper", ""),
    ),
    "profile": (
        ("name", "model", ""),
        ("mode", "kernel", ""),
        ("calls", "calls", ",d"),
        ("device_ms", "device ms", ".3f"),
        ("share", "share", ".1%"),
        ("busy", "of the step, all kernels", ".1%"),
    ),
}
# Section, what a row must be (name starts with), figure, sign, bound, in words.
GOALS = (
    ("models", "dense", "tflops", 500.0, "dense: at least 500 TFLOP/s in the best mode"),
    ("models", "hybrid", "tflops", 350.0, "hybrid: at least 350 TFLOP/s in the best mode"),
    ("models", "", "estimate_off", 0.03, "estimate within 3 % of what a device has in use"),
    ("models", "", "upper_held", True, "never more in use than the upper bound"),
    ("estimator", "", "estimate_off", 0.03, "estimate within 3 %, over the grid"),
    ("estimator", "", "upper_held", True, "never more than the upper bound, over the grid"),
)


@dataclass
class GpuRecord:
    """Rows of one run, in a file that is rewritten with each.

    Attributes:
        path: file of JSON; None: nothing is written.
        seconds: time limit of the run; nothing new is begun after it.
        rows, skipped: measured rows, and the others with the reason.
    """

    path: Path | None
    device: torch.device
    seconds: float
    tiny: bool = False
    rows: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)
    lost: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.seconds - (time.monotonic() - self.began)

    def attempt(self, section: str, name: str, mode: str, run: Callable[[], Iterable[Row]]) -> bool:
        """Add the rows of one measurement; an error is one line of the record, and the run goes on.

        Args:
            section: section of the record.
            name: what is measured.
            mode: variant of it.
            run: yields rows.
        """
        if self.lost:
            self.skip(section, name, mode, "the device was lost before")
        elif self.left_s <= 0:
            self.skip(section, name, mode, f"the {self.seconds:.0f} s of this run were over")
        else:
            self.say(f"{section}: {name} {mode} ...")
            try:
                for row in run():
                    self.add({"section": section, "name": name, "mode": mode} | row)
                return True
            except Exception as error:  # an error of one row must not stop the others
                traceback.print_exc(limit=-6, file=sys.stderr)
                self.skip(section, name, mode, one_line(error))
                self.lost = _lost(self.device)
        return False

    def add(self, row: Row) -> None:
        """Add a row; a non-finite figure is named in it and left out of tables."""
        bad = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        self.rows.append(row | dict.fromkeys(bad) | ({"not_finite": bad} if bad else {}))
        self.save()

    def skip(self, section: str, name: str, mode: str, why: str) -> None:
        """Add a measurement that isn't made, with the reason.

        Args:
            section: section of the record.
            name: what isn't measured.
            mode: variant of it.
            why: reason.
        """
        self.say(f"{section}: {name} {mode}: not run: {why}")
        self.skipped.append({"section": section, "name": name, "mode": mode, "why": why})
        self.save()

    def say(self, words: str) -> None:
        """Print a line of progress, with elapsed and remaining time."""
        gone = time.monotonic() - self.began
        print(f"[{duration(gone)}, {duration(self.left_s)} left] {words}", flush=True)

    def save(self) -> None:
        """Write the file."""
        if self.path is not None:
            write_json(self.path, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON."""
        packages = installed()
        return {
            **hardware(self.device),
            "torch": torch.__version__,
            "triton": packages.get("triton"),
            "python": platform.python_version(),
            "packages": packages,
            "commit": git_commit(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "tiny": self.tiny,
            "seconds": round(time.monotonic() - self.began, 1),
            "rows": self.rows,
            "skipped": self.skipped,
        }


def hardware(device: torch.device) -> dict[str, Any]:
    """Return name, capability, driver and memory of a device."""
    if device.type != "cuda":
        return {"device": device_name(device), "capability": None, "driver": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": device_name(device),
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "memory_bytes": properties.total_memory,
    }


def one_line(error: BaseException) -> str:
    """Return an error as a line that fits a table."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


def _lost(device: torch.device) -> bool:
    """Return whether a device no longer answers; every later call would then fail."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:  # any error means that it is lost
        return True
    return False


# ---- what is shown ------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any] | None:
    """Return a stored record, or None."""
    return json.loads(path.read_text()) if path.exists() else None


def cell(row: Row, key: str, form: str) -> str:
    """Return a figure as text for a table."""
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, form) if form else str(value)


def reached(rows: Sequence[Row]) -> list[tuple[str, str, bool | None]]:
    """Return each goal with its measured value, and whether it is reached (None: not run)."""
    found: list[tuple[str, str, bool | None]] = []
    for section, start, key, bound, words in GOALS:
        values = [
            row[key]
            for row in rows
            if row["section"] == section
            and str(row["name"]).startswith(start)
            and row.get(key) is not None
        ]
        if not values:
            found.append((words, "not run", None))
        elif key == "tflops":
            found.append((words, f"{max(values):.1f}", max(values) >= bound))
        elif key == "upper_held":
            found.append((words, f"{sum(values)} of {len(values)}", all(values)))
        else:
            worst = max(values, key=abs)
            found.append((words, f"{worst:+.2%}", abs(worst) <= bound))
    return found


def as_markdown(found: dict[str, Any] | None) -> str:
    """Return the section of docs/benchmarks.md: every table, `not run` where there is nothing."""
    rows: list[Row] = found["rows"] if found else []
    lines = []
    if found:
        lines += [
            f"{found['device']}, capability {found['capability']}, driver {found['driver']}, torch "
            f"{found['torch']}, triton {found['triton']}, commit {found['commit']}, "
            f"{found['date']}.",
            "",
        ]
    lines += ["| goal | measured | reached |", "|---|---|---|"]
    for words, value, ok in reached(rows):
        lines.append(f"| {words} | {value} | {'' if ok is None else 'yes' if ok else 'no'} |")
    for section, columns in COLUMNS.items():
        own = [row for row in rows if row["section"] == section]
        used = [c for c in columns if not own or any(row.get(c[0]) is not None for row in own)]
        lines += ["", f"`{section}`:", "", "| " + " | ".join(c[1] for c in used) + " |"]
        lines.append("|" + "---|" * len(used))
        for row in own:
            lines.append("| " + " | ".join(cell(row, key, form) for key, _, form in used) + " |")
        if not own:
            lines.append("| " + " | ".join(["not run"] + [""] * (len(used) - 1)) + " |")
    if found and found["skipped"]:
        lines += ["", "Not run, and why:", ""]
        lines += [
            f"- {s['section']}: {s['name']} {s['mode']}: {s['why']}" for s in found["skipped"]
        ]
    return "\n".join(lines)


def show(found: dict[str, Any]) -> None:
    """Print the tables on the screen."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, width=200)
    for section, columns in COLUMNS.items():
        own = [row for row in found["rows"] if row["section"] == section]
        if not own:
            continue
        used = [c for c in columns if any(row.get(c[0]) is not None for row in own)]
        table = Table(title=section, title_justify="left")
        for _, heading, form in used:
            table.add_column(heading, justify="right" if form else "left")
        for row in own:
            table.add_row(*(cell(row, key, form) for key, _, form in used))
        console.print(table)
    for words, value, ok in reached(found["rows"]):
        mark = "    " if ok is None else "yes " if ok else "NO  "
        console.print(f"{mark}{words}: {value}", markup=False, highlight=False)
