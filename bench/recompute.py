"""Step time and peak memory of recompute setups, side by side.

    python bench/recompute.py tiny
    python bench/recompute.py dense_4m --compiled

Every choice of megacpp/lessons/recompute.py takes a step in turn, so that all see the same machine.
Bytes are those of tensors, counted operator by operator on the same step
(checkpointing/tracing/meter.py). Ratios are to keeping all. On a GPU the same command measures the
GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench import parser_of
from bench.shapes import names, shape
from bench.step import Trainer
from checkpointing.tracing.meter import Meter
from megacpp.config.checks.every import resolve
from megacpp.config.schema import Config
from megacpp.lessons.recompute import CHOICES, COMPILED, KEEP_ALL, RecomputeSetup
from parallel.mesh import World
from parallel.start import pick_device

Row = dict[str, float]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("shape", nargs="?", default="tiny", help=f"one of {names()}")
    parser.add_argument("--steps", type=int, default=6, help="measured steps (default 6)")
    parser.add_argument("--compiled", action="store_true", help="compiled blocks too (minutes)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = pick_device("auto")
    config = resolve(shape(options.shape), 1)
    choices = [c for c in (*CHOICES, *(COMPILED if options.compiled else ())) if fits(c, config)]
    rows = _measure(config, choices, options.steps, World(0, 1, device))
    print(f"{options.shape} on {device.type}, 1 thread; ratios to keeping all")
    print(table(rows))


def fits(choice: RecomputeSetup, config: Config) -> bool:
    """Return whether a model has the layers that a setup concerns."""
    letters = set(config.model.pattern)
    return not choice.policy.compress or bool(letters & set("AF"))


def _measure(
    config: Config, choices: list[RecomputeSetup], steps: int, world: World
) -> dict[str, Row]:
    """Return seconds per step in turns, saved bytes and the peak of one step."""
    trainers = {}
    for choice in choices:
        own = choice.apply(config)
        trainers[choice.name] = Trainer(own, world, choice.build(own, world.device))
    shape_BT = (config.train.device_batch_size, config.data.seq_len)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(steps + 1):
        g = torch.Generator().manual_seed(number)
        ids = torch.randint(config.model.vocab_size, shape_BT, generator=g).to(world.device)
        for name in list(trainers) if number % 2 else list(trainers)[::-1]:
            began = time.perf_counter()
            trainers[name].step(ids, ids)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first compiles and fills caches
                seconds[name].append(time.perf_counter() - began)
    rows: dict[str, Row] = {}
    for name, trainer in trainers.items():
        rows[name] = {"step_s": statistics.median(seconds[name]), **memory(trainer, ids, world)}
    first = rows[KEEP_ALL.name]
    for row in rows.values():
        row |= {"time_ratio": row["step_s"] / first["step_s"]}
        row |= {"kept_ratio": row["kept_mib"] / first["kept_mib"]}
        row |= {"peak_ratio": row["peak_mib"] / first["peak_mib"]}
    return rows


def memory(trainer: Trainer, ids: torch.Tensor, world: World) -> Row:
    """Return MiB saved from the forward to the backward, and the peak, of activations.

    Args:
        trainer: trainer of the setup.
        ids: `[B, T]`, tokens and labels.
        world: ranks and device.
    """
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with Meter(trainer.model) as meter:
        trainer.accumulate(ids, ids)
    kept = sum(alloc.bytes for alloc in meter.kept if not alloc.weight and not alloc.batch)
    peak = max(size for _, size in meter.timeline())
    if world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    trainer.optimizer.zero_grad()
    return {"kept_mib": kept / 2**20, "peak_mib": peak / 2**20}


def table(rows: dict[str, Row]) -> str:
    """Return a line of figures for each setup."""
    heads = ("step s", "kept MiB", "peak MiB", "time", "kept", "peak")
    lines = [f"{'':24}" + "".join(f"{head:>10}" for head in heads)]
    for name, row in rows.items():
        cells = f"{row['step_s']:10.3f}{row['kept_mib']:10.1f}{row['peak_mib']:10.1f}"
        ratios = (row["time_ratio"], row["kept_ratio"], row["peak_ratio"])
        lines.append(f"{name:24}{cells}" + "".join(f"{ratio:10.2f}" for ratio in ratios))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
