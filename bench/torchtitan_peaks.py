"""Published peaks of torchtitan's Llama 3 against a replay of its allocations, without a GPU.

    python bench/torchtitan_peaks.py

The published figure is the most that PyTorch's allocator reserved on an H100 with 95 GiB. Two
steps of rank 0 are recorded with fake tensors (bench/llama31.py) and replayed through a model of
the allocator (megacpp/memory/allocator.py). Nothing is fitted. `active` is what tensors hold, `one
pool` what would be reserved if FSDP2's streams shared memory, `expandable` with such segments.
70B and 405B were compiled and had products in FP8; here they are eager in bf16, and of 405B's
pipeline the first stage alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from bench.llama31 import STAGE_405B, TP_70B, Shape, record
from megacpp.memory.allocator import replay

GIB = 2**30
CAPACITY = 95 * GIB

Row = dict[str, float | str]


@dataclass(frozen=True)
class PublishedPeak:
    """Run whose reserved memory was published.

    Attributes:
        ranks: that share a stage.
        shape: of the stage.
        gib: reserved, of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md.
    """

    ranks: int
    shape: Shape
    gib: float


PUBLISHED = {
    "8B, 8 ranks": PublishedPeak(8, Shape(), 82.4),
    "8B, 128 ranks": PublishedPeak(128, Shape(), 67.0),
    "70B, 256 ranks": PublishedPeak(256, TP_70B, 71.9),
    "405B, 512 ranks": PublishedPeak(64, STAGE_405B, 82.5),
}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="recorded steps (default 2)")
    options = parser.parse_args()
    rows = [predict(name, options.steps) for name in PUBLISHED]
    print(table(rows))


def predict(name: str, steps: int = 2) -> Row:
    """Return a replay's figures in GiB beside the published ones, given a name in PUBLISHED."""
    run = PUBLISHED[name]
    stream = record(run.ranks, steps, run.shape)
    found = replay(stream, limit=CAPACITY)
    shared = replay(stream, pools=lambda block: 0)
    expandable = replay(stream, expandable=True)
    return {
        "run": name,
        "published": run.gib,
        "reserved": found.reserved_bytes / GIB,
        "off": found.reserved_bytes / GIB / run.gib - 1,
        "active": found.requested_bytes / GIB,
        "one pool": shared.reserved_bytes / GIB,
        "expandable": expandable.reserved_bytes / GIB,
    }


def table(rows: list[Row]) -> str:
    """Return rows as text."""
    lines = [[*rows[0]], *([_shown(name, value) for name, value in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{x:>{width}}" for x, width in zip(line, widths, strict=True)) for line in lines
    )


def _shown(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:+.1%}" if name == "off" else f"{value:.2f}"


if __name__ == "__main__":
    main()
