"""Command `megacpp memory diff`: growth between two snapshots of a run, its cause and the fix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megacpp.config.settings import setting
from megacpp.memory.budget import words
from megacpp.memory.snapshot import STEADY, Difference, compare, read_snapshot
from megacpp.terminal.screen import labelled, wrapped


@dataclass(frozen=True)
class DiffArgs:
    """Two snapshots."""

    before: str = setting(
        words="Earlier snapshot of a run (RUN/memory/step-A.json).", positional=True
    )
    after: str = setting(words="Later snapshot (RUN/memory/step-B.json).", positional=True)
    json: bool = setting(False, "Print one JSON object instead of text.")


def memory_diff(args: DiffArgs) -> int:
    """Bytes by component before and after, largest growth first, with the likely cause and the fix.

    A run writes a snapshot every memory.snapshot_every steps, and another one memory.snapshot_gap
    steps later.
    """
    found = compare(read_snapshot(Path(args.before)), read_snapshot(Path(args.after)))
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
        return 0
    print("\n".join(lines(found)))
    return 0


def lines(found: Difference) -> list[str]:
    """Return a comparison as a table."""
    before, after = found.before, found.after
    head = f"rank {after.rank}, most bytes of a step"
    said = [f"{head:32}{f'step {before.step}':>14}{f'step {after.step}':>14}{'grown':>14}"]
    for row in found.rows:
        shown = [words(row.before), words(row.after), signed(row.grown)]
        said.append(f"  {row.bucket:30}" + "".join(f"{cell:>14}" for cell in shown))
    for name in ("peak_bytes", "reserved_bytes", "resting_bytes"):
        was, now = getattr(before, name), getattr(after, name)
        if was or now:
            cells = [words(was), words(now), signed(now - was)]
            label = name.removesuffix("_bytes") + (" of the step" if name == "peak_bytes" else "")
            said.append(f"{label:32}" + "".join(f"{cell:>14}" for cell in cells))
    if not (before.followed and after.followed):
        said.append("no tensors of a step were followed: only what rests is compared")
    said.append("")
    if found.cause is STEADY:
        return [*said, *wrapped(f"{STEADY.name}: {STEADY.words}")]
    top, grown = found.largest, next(iter(found.by_cause.values()))
    said += [
        *labelled("top grower:", f"{top.bucket}, {signed(top.grown)}", 12),
        *labelled("diagnosis:", f"{found.cause.name}: {found.cause.words} ({signed(grown)})", 12),
        *labelled("fix:", found.cause.fix, 12),
    ]
    others = [f"{name} {signed(more)}" for name, more in list(found.by_cause.items())[1:]]
    return [*said, *(labelled("beside it:", ", ".join(others), 12) if others else [])]


def signed(n: int) -> str:
    """Return growth in words; empty for zero."""
    return f"{'+' if n > 0 else '-'}{words(abs(n))}" if n else ""
