"""What an allocator reserves beyond what the tensors of a run's first steps hold, without a GPU.

    python bench/allocator.py 8 nam56r_base --mesh.tp 2 --mesh.ep 4 --model.depth 13

Two steps of rank 0 of 8, from the weights on: the optimizer's state is made after the first
backward, and lands in the gaps that activations left. Fake tensors, so any number of ranks; the
trainer's own model. The shares of megacpp/memory/allocator.py are from this command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpointing.apply import Keeper
from checkpointing.recorder import Recorder
from megacpp.arguments import parse_run
from megacpp.cli.trace import MICROBATCHES, Trainee
from megacpp.config import Config
from megacpp.memory.allocator import allocator_overhead, beside_bytes, replay
from megacpp.memory.stream import Stream
from megacpp.memory.timeline import write_snapshot
from parallel.fake import FakeBoundary, as_trained, fake_tensors, fake_world, planned_model

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("ranks", type=int)
    parser.add_argument("--steps", type=int, default=2, help="recorded steps (default 2)")
    parser.add_argument("--snapshot", help="write a file for PyTorch's memory viewer, too")
    options, run = parser.parse_known_args()
    stream = record(parse_run(run, options.ranks).config, options.ranks, options.steps)
    print(report(stream))
    if options.snapshot:
        write_snapshot(stream, options.snapshot)


def record(config: Config, size: int, steps: int) -> Stream:
    """Every allocation of rank 0, from the weights on, for a number of steps."""
    config = as_trained(config)
    with fake_world(config, size) as world:
        model = planned_model(config, world, Keeper(config))
        with fake_tensors(memory=True), Recorder(model) as recorder:
            model.to_empty(device=world.device)
            model.train()
            trainee = Trainee.of(model, world, config, FakeBoundary)
            for index in range(steps):
                recorder.mark(f"step {index + 1}")
                trainee.step(config, min(MICROBATCHES, config.train.grad_accum), recorder.stage)
            recorder.name_resting(trainee.optimizer)
        return recorder.stream()


def report(stream: Stream) -> str:
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
            f"{(tensors + expected) / GIB:.2f}, at most {(tensors + most) / GIB:.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
