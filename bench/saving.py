"""Time that a save holds a step up: synchronous against asynchronous, in turns, in one process.

    python bench/saving.py dense_4m
    torchrun --standalone --nproc-per-node=2 bench/saving.py dense_4m

Steps of the model go on while an asynchronous save writes, as in a run. Also printed: how much
slower they are meanwhile, and what part of a save is the check that all values are finite.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from bench import parser_of
from bench.shapes import names, shape
from bench.step import Trainer
from megacpp.config.checks.every import resolve
from megacpp.state.agreement import gather, share
from megacpp.state.soundness import unsound
from megacpp.state.training import TrainingState
from parallel.start import pick_device, start, world_size


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("shape", nargs="?", default="dense_4m", help=f"one of {names()}")
    parser.add_argument("--saves", type=int, default=5, help="measured saves of each kind")
    parser.add_argument("--dir", default=None, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = resolve(shape(options.shape), world_size())
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, async_=True)
    )
    world = start(config.mesh, pick_device("auto"))
    trainer = Trainer(config, world)
    folder = Path(share(tempfile.mkdtemp(dir=options.dir), 0))
    state = TrainingState(folder, trainer.model, trainer.optimizer, config, "")
    size = (config.train.device_batch_size, config.data.seq_len)
    ids_BT = torch.randint(config.model.vocab_size, size, device=world.device)

    def step() -> float:
        return _timed(lambda: trainer.step(ids_BT, ids_BT))

    def save(behind: bool) -> float:
        state.step += 1
        if world.size > 1:
            dist.barrier()
        return _timed(lambda: state.save(1, behind=behind))

    held: dict[bool, list[float]] = {False: [], True: []}
    alone, beside, checks = [], [], []
    for turn in range(options.saves + 1):  # the first turn warms up
        for behind in (False, True):
            alone.append(step())
            checks.append(_timed(lambda: unsound(state.tensors())))
            seconds = save(behind)
            if turn:
                held[behind].append(seconds)
            while behind and any(gather(state.writer.busy)):
                beside.append(step())
            state.writer.wait()
    if world.is_main:
        num_bytes = sum(p.stat().st_size for p in folder.rglob("*.safetensors"))
        sync_s, async_s = (statistics.median(held[kind]) for kind in (False, True))
        print(f"{options.shape}, {world.size} ranks, {num_bytes / 1e6:,.1f} MB a checkpoint")
        print(f"synchronous   {1e3 * sync_s:8.1f} ms a save holds the step up")
        print(f"asynchronous  {1e3 * async_s:8.1f} ms, ratio {async_s / sync_s:.3f}")
        check_s = statistics.median(checks)
        print(f"finite check  {1e3 * check_s:8.1f} ms of it, {check_s / sync_s:.1%}")
        print(f"step          {1e3 * statistics.median(alone):8.1f} ms, beside a save that writes")
        print(f"              {1e3 * statistics.median(beside):8.1f} ms ({len(beside)} steps)")
    world.close()


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
