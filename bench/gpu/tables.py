"""Tables of a GPU's measurements, as docs/benchmarks.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.record import Row

HEADING = "## On a GPU"
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
    "ceilings": (
        ("mode", "ceiling", ""),
        ("tb_s", "TB/s", ".2f"),
        ("tflops", "TFLOP/s", ".1f"),
        ("ms", "ms", ".4f"),
    ),
    "tests": (
        ("name", "file", ""),
        ("passed", "passed", ",d"),
        ("failed", "failed", ",d"),
        ("skipped", "skipped", ",d"),
        ("seconds", "s", ".1f"),
    ),
    "levers": (
        ("name", "lever", ""),
        ("mode", "variant", ""),
        ("shape", "shape", ""),
        ("forward_ms", "forward ms", ".3f"),
        ("ms", "ms", ".3f"),
        ("tflops", "TFLOP/s", ".1f"),
        ("peak_gib", "peak GiB", ".3f"),
        ("seconds", "s", ".1f"),
    ),
    "predicted": (
        ("name", "model", ""),
        ("mode", "mode", ""),
        ("step_s", "step s", ".4f"),
        ("predicted_s", "predicted", ".4f"),
        ("step_off", "off", "+.1%"),
    ),
    "plan": (
        ("mode", "call", ""),
        ("name", "cell", ""),
        ("end", "end", ""),
        ("seconds", "s", ".1f"),
        ("limit_s", "limit s", ".0f"),
    ),
}
# Section, what a row must be (name starts with), figure, sign, bound, in words.
GOALS = (
    ("models", "dense", "tflops", 560.0, "dense: at least 560 TFLOP/s in the best mode"),
    ("models", "hybrid", "tflops", 400.0, "hybrid: at least 400 TFLOP/s in the best mode"),
    ("models", "", "estimate_off", 0.03, "estimate within 3 % of what a device has in use"),
    ("models", "", "upper_held", True, "never more in use than the upper bound"),
    ("estimator", "", "estimate_off", 0.03, "estimate within 3 %, over the grid"),
    ("estimator", "", "upper_held", True, "never more than the upper bound, over the grid"),
)


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
    lines, mark = [], []
    if found and "device" in found:  # else no cell came to its first row
        mark = [f"Run {found['date'][:10]}, {(found['commit'] or '')[:7]}:", ""]
        lines += [
            "{device}, capability {capability}, driver {driver}, torch {torch}, triton {triton}, "
            "commit {commit}, {date}.".format_map(found),
            "",
            *mark,
        ]
    lines += ["| goal | measured | reached |", "|---|---|---|"]
    for words, value, ok in reached(rows):
        lines.append(f"| {words} | {value} | {'' if ok is None else 'yes' if ok else 'no'} |")
    for section, columns in COLUMNS.items():
        own = [row for row in rows if row["section"] == section]
        used = [c for c in columns if not own or any(row.get(c[0]) is not None for row in own)]
        lines += ["", f"`{section}`:", "", *(mark if own else [])]
        lines.append("| " + " | ".join(c[1] for c in used) + " |")
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


def write_section(page: Path, heading: str, table: str) -> None:
    """Put a table in a section of a page, below the section's first paragraph.

    Args:
        page: docs/benchmarks.md.
        heading: of the section.
        table: Markdown.
    """
    text = page.read_text()
    start = text.index(heading)
    section, *later = text[start:].split("\n## ", 1)
    words = "\n\n".join(section.strip().split("\n\n")[:2])
    page.write_text("\n## ".join([f"{text[:start]}{words}\n\n{table}\n", *later]))
