"""Bytes that an allocator reserves beyond the tensors of a run's first steps, without a GPU.

    python bench/allocator.py 8 nam56r_base --mesh.tp 2 --mesh.ep 4 --model.depth 13

Two steps of rank 0 of 8, from the weights on: the optimizer's state is made after the first
backward, and lands in the gaps that activations left. Fake tensors, so any number of ranks; the
trainer's own model. The shares of megacpp/memory/allocator.py are from this command.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import parser_of
from megacpp.cli.trace import trace_run
from megacpp.config.arguments import parse_run
from megacpp.config.schema import Config
from megacpp.memory.allocator import allocator_overhead, beside_bytes, replay
from megacpp.memory.budget import as_run
from megacpp.memory.device import runtime_bytes
from megacpp.memory.estimate import estimate
from megacpp.memory.stream import Stream

GIB = 2**30


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--steps", type=int, default=2, help="recorded steps (default 2)")
    options, run = parser.parse_known_args()
    config = parse_run(run, options.ranks).config
    config = config if config.train.device == "cpu" else as_run(config, "cuda", narrow=True)
    stream = trace_run(config, options.ranks, steps=options.steps)
    print(report(config, options.ranks, stream))


def report(config: Config, size: int, stream: Stream) -> str:
    """Return the reserved bytes of a recorded run as text."""
    tensors, beside = stream.peak()[1], beside_bytes(stream)
    lines = [
        f"tensors {tensors / GIB:8.2f} GiB at their fullest, in {stream.where(stream.peak()[0])}",
        f"beside  {beside / GIB:8.2f} GiB more in pools of other streams",
    ]
    for expandable in (False, True):
        found = replay(stream, expandable)
        over = found.reserved_bytes - tensors
        expected, most = allocator_overhead(tensors, expandable, beside)
        lines.append(
            f"{'expandable' if expandable else 'default':10} reserved "
            f"{found.reserved_bytes / GIB:.2f} GiB ({over / tensors:+.1%}) in {found.segments} "
            f"segments; {(over - beside) / (tensors + beside):.1%} of all pools; expected "
            f"{(tensors + expected) / GIB:.2f}, at most {(tensors + most) / GIB:.2f}; "
            f"of the estimate at most {bound(config, size, expandable) / GIB:.2f}"
        )
    return "\n".join(lines)


def bound(config: Config, size: int, expandable: bool) -> int:
    """Return the bytes that the estimate's upper bound leaves to the allocator."""
    memory = replace(config.memory, expandable_segments=expandable)
    found = estimate(replace(config, memory=memory), size, detail=False)
    return found.upper - runtime_bytes(config, size)


if __name__ == "__main__":
    main()
