"""Step time, CPU time, tokens/s, memory and operations of a training step; ratios in one run.

    python bench/step.py dense_4m --compare plain
    torchrun --standalone --nproc-per-node=2 bench/step.py dense_4m

With `--predict` the ranks measure this machine together before and after the steps, as `python -m
bench.gpu --calibrate` does, and the time that the model of `megacpp speed` predicts from it is
printed beside the measured one.

With `--compare plain` megacpp and the plain loop of megacpp/lessons/plain.py take turns, step by
step, in one process, so that both see the same machine; peak memory is measured in a process of its
own for each. Shapes: bench/shapes.py; any preset works without `--compare`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from bench import parser_of
from bench.gpu.calibrate import OperatorCount, calibrate
from bench.shapes import names, shape
from checkpointing.apply import ActivationCheckpointing
from megacpp.config.checks.every import resolve
from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.lessons.plain import PlainTrainer
from megacpp.memory.budget import as_run
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.init import initialise
from megacpp.run.metrics import peak_resident_bytes
from megacpp.speed.hardware import Rates, gpu
from megacpp.speed.ours import step_work
from megacpp.speed.step import predict
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.mesh import World
from parallel.start import pick_device, start, world_size


class BuiltRun:
    """Model of a run, with its optimizer and boundary, as train.py builds them."""

    def __init__(
        self, config: Config, world: World, ac: ActivationCheckpointing | None = None
    ) -> None:
        self.config, self.world, self.device = config, world, world.device
        self.model = build_model(config, world, ac or ActivationCheckpointing(config, world.device))
        self.optimizer = build_optimizer(self.model, config, world.holders)
        self.boundary = AccumulationBoundary(self.model, world, config)

    def update(self) -> None:
        """Clip, step and zero the gradients."""
        boundary = self.boundary
        clip_gradients(boundary.params, self.config.optim.clip_norm, boundary.copies)
        self.optimizer.step()
        self.optimizer.zero_grad()
        boundary.finish_step()


class Trainer(BuiltRun):
    """Step of train.py without its corpus: accumulate, clip, step, zero."""

    def accumulate(self, ids_BT: Tensor, labels_BT: Tensor) -> None:
        """Run forward and backward."""
        docs = Documents.rows(*ids_BT.shape, device=ids_BT.device)
        batch = Batch(
            ids_BT, labels_BT, docs, target_bytes=1, num_targets=ids_BT.numel(), rows=(0,)
        )
        self.boundary.accumulate([batch])

    def step(self, ids_BT: Tensor, labels_BT: Tensor) -> None:
        """Run one training step."""
        self.accumulate(ids_BT, labels_BT)
        self.update()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("shape", nargs="?", default="dense_4m", help=f"one of {names()}")
    parser.add_argument("--compare", choices=["plain"], help="measure against this in turns")
    parser.add_argument("--steps", type=int, default=12, help="measured steps (default 12)")
    parser.add_argument("--predict", action="store_true", help="measure the machine, and predict")
    parser.add_argument("--only", choices=["megacpp", "plain"], help="one trainer, print its peak")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = pick_device("auto")
    config = resolve(shape(options.shape), world_size())
    world = start(config.mesh, device)
    if options.compare and world.size > 1:
        parser.error("--compare runs on one process: the plain loop is not data parallel")
    if options.only:
        _run({options.only: _trainer(options.only, config, world)}, config, 3, world)
        print(peak_resident_bytes())
        return
    wanted = ["megacpp"] + (["plain"] if options.compare else [])
    trainers = {name: _trainer(name, config, world) for name in wanted}
    foreseen = [_predicted(config, world)] if options.predict else []
    rows = _run(trainers, config, options.steps, world)
    if options.predict:
        foreseen.append(_predicted(config, world))
    if world.size == 1:
        for name, row in rows.items():
            row["peak_bytes"] = _peak_of(name, options.shape)
    result = {"shape": options.shape, "ranks": world.size, "device": device.type, "trainers": rows}
    if options.compare:
        result["ratios"] = {k: rows["megacpp"][k] / rows["plain"][k] for k in rows["plain"]}
    if world.is_main and world.size == 1:
        result["operations_per_block"] = _operations(config, device)
    if foreseen:
        result["predicted_s"] = statistics.mean(foreseen)
    if world.is_main:
        print(_table(result))
    world.close()


def _trainer(name: str, config: Config, world: World) -> Callable[[Tensor, Tensor], None]:
    return (
        Trainer(config, world).step
        if name == "megacpp"
        else PlainTrainer(config, world.device).step
    )


def _predicted(config: Config, world: World) -> float:
    """Return predicted seconds of a step, from what the ranks measure of their machine now."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.json"
        calibrate(world.device, file)
        if not world.is_main:
            return 0.0
        machine = gpu(str(file))
        config = as_run(config, world.device.type, world.device.type == "cuda")
        work = step_work(config, world.size, machine.generation, world.size)
        return predict(work, machine, Rates()).step_s


def _run(
    trainers: dict[str, Callable[[Tensor, Tensor], None]], config: Config, steps: int, world: World
) -> dict[str, dict[str, float]]:
    """Return median and least wall and CPU seconds a step, in turns; two steps are unmeasured."""
    shape_BT = (config.train.device_batch_size, config.data.seq_len)
    wall: dict[str, list[float]] = {name: [] for name in trainers}
    cpu: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(steps + 2):
        g = torch.Generator().manual_seed(number * world.size + world.rank)
        ids = torch.randint(config.model.vocab_size, shape_BT, generator=g).to(world.device)
        labels = torch.randint(config.model.vocab_size, shape_BT, generator=g).to(world.device)
        order = list(trainers) if number % 2 else list(trainers)[::-1]
        for name in order:
            began, cpu_began = time.perf_counter(), time.process_time()
            trainers[name](ids, labels)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - cpu_began)
    tokens = shape_BT[0] * shape_BT[1] * world.size
    return {
        name: {
            "wall_s_median": statistics.median(wall[name]),
            "wall_s_min": min(wall[name]),
            "cpu_s_median": statistics.median(cpu[name]),
            "cpu_s_min": min(cpu[name]),
            "tokens_per_s": tokens / statistics.median(wall[name]),
        }
        for name in trainers
    }


def _peak_of(name: str, shape_name: str) -> int:
    """Return peak resident bytes of three steps in a process of their own."""
    command = [sys.executable, __file__, shape_name, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def _operations(config: Config, device: torch.device) -> dict[str, int]:
    """Return operations of one forward and backward of each block kind (kernels, on a GPU)."""
    counts: dict[str, int] = {}
    for letter in dict.fromkeys(config.model.pattern.replace("|", "")):
        with torch.device("meta"):
            block = Block(letter, config.model)
        block.to_empty(device=device)
        initialise(block, block.init_rules(), seed=0)
        x = torch.randn(1, config.data.seq_len, config.model.dim, device=device, requires_grad=True)
        docs = Documents.rows(1, config.data.seq_len, device)
        block(x, docs).sum().backward()
        with OperatorCount() as counter:
            block(x, docs).sum().backward()
        counts[letter] = counter.ran
    return counts


def _table(result: dict) -> str:
    rows = result["trainers"]
    lines = [f"{result['shape']} on {result['device']}, {result['ranks']} rank(s), 1 thread each"]
    columns = [*rows, *(["ratio"] if "ratios" in result else [])]
    lines.append(f"{'':16}" + "".join(f"{c:>14}" for c in columns))
    for key in next(iter(rows.values())):
        cells = [
            f"{row[key]:14,.4f}" if row[key] < 1e3 else f"{row[key]:14,.0f}"
            for row in rows.values()
        ]
        if "ratios" in result:
            cells.append(f"{result['ratios'][key]:14.3f}")
        lines.append(f"{key:16}" + "".join(cells))
    if "predicted_s" in result:
        of = result["predicted_s"] / rows["megacpp"]["wall_s_median"]
        lines.append(f"predicted: {result['predicted_s']:.4f} s, {of:.2f} of the measured median")
    for letter, number in result.get("operations_per_block", {}).items():
        lines.append(f"block {letter}: {number} operations forward and backward")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
