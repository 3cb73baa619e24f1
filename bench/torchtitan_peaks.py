"""Published peaks of torchtitan's Llama-3.1-8B against a replay of its allocations, without a GPU.

    python bench/torchtitan_peaks.py

The published figure is the most that PyTorch's allocator reserved on an H100 with 95 GiB. Two
steps of rank 0 are recorded with fake tensors (bench/llama31.py) and replayed through a model of
the allocator (megacpp/memory/allocator.py). Nothing is fitted. `active` is what tensors hold, `one
pool` what would be reserved if FSDP2's streams shared memory, `expandable` with such segments.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from bench.llama31 import record
from megacpp.memory.allocator import Replay, replay

GIB = 2**30
# Ranks and GiB: tables 1 and 3, eager, of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md.
PUBLISHED = {8: 82.4, 128: 67.0}
CAPACITY = 95 * GIB

Row = dict[str, float | str]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="recorded steps (default 2)")
    options = parser.parse_args()
    rows = [predict(ranks, published, options.steps) for ranks, published in PUBLISHED.items()]
    print(table(rows))


def predict(ranks: int, published: float, steps: int = 2) -> Row:
    """Return a replay's figures in GiB beside the published ones."""
    start = time.perf_counter()
    stream = record(ranks, steps)
    traced = time.perf_counter()
    found = replay(stream, limit=CAPACITY)
    done = time.perf_counter()
    shared = replay(stream, pools=lambda block: 0)
    expandable = replay(stream, expandable=True)
    return {
        "ranks": ranks,
        "published": published,
        "reserved": found.reserved_bytes / GIB,
        "off": found.reserved_bytes / GIB / published - 1,
        "active": found.requested_bytes / GIB,
        "one pool": shared.reserved_bytes / GIB,
        "expandable": expandable.reserved_bytes / GIB,
        "reached in": reached(found),
        "record_s": traced - start,
        "replay_s": done - traced,
    }


def reached(found: Replay) -> str:
    """Return the step and the part with the most reserved bytes."""
    step = ""
    for name, reserved in found.marks:
        step = name if name.startswith("step") else step
        if reserved == found.reserved_bytes:
            return f"{step}, {name}"
    return ""


def table(rows: list[Row]) -> str:
    """Return rows as text."""
    names = list(rows[0])
    return "\n".join(
        "  ".join(f"{x:>{max(10, len(name))}}" for x, name in zip(line, names, strict=True))
        for line in (names, *([_shown(name, row[name]) for name in names] for row in rows))
    )


def _shown(name: str, value: float | str) -> str:
    if isinstance(value, str | int):
        return str(value)
    return f"{value:+.1%}" if name == "off" else f"{value:.2f}"


if __name__ == "__main__":
    main()
