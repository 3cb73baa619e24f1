"""Step time of every mesh on 2 and 4 ranks beside one process, and what context parallelism costs.

    python bench/parallel.py                      # meshes, then sequence lengths
    python bench/parallel.py --only meshes --ranks 2

Ranks are forked gloo processes of one thread on this machine: with fewer cores than ranks a mesh
can't be faster than one process, and the figures show what the mesh itself costs. Every mesh trains
the same rows; one process runs before and after, so that a change of the machine shows.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch._dynamo
import torch.distributed as dist

from bench import parser_of
from megacpp.config.checks.every import resolve
from megacpp.config.presets import preset
from megacpp.config.schema import Config, DataConfig, MeshConfig, OptimConfig, TrainConfig
from megacpp.model.count import meta_model
from megacpp.model.documents import Documents
from megacpp.model.init import initialise
from optim.build import build_optimizer
from optim.clip import clip_gradients
from parallel.apply import context_plan
from parallel.boundary import AccumulationBoundary
from parallel.build import build_model
from parallel.context.layout import ContextLayout
from parallel.mesh import World
from parallel.start import join
from tests.ranks import run_ranks
from tests.synthetic import micro_rows, ragged_batch

CPU = torch.device("cpu")
ROWS, TOKENS = 8, 256
ONE = MeshConfig(dp_shard=1)
MESHES = {
    2: (
        MeshConfig(dp_shard=2),
        MeshConfig(dp_shard=1, tp=2),
        MeshConfig(dp_shard=2, ep=2),
        MeshConfig(dp_shard=1, cp=2),
        MeshConfig(dp_shard=1, pp=2),
    ),
    4: (
        MeshConfig(dp_shard=4),
        MeshConfig(dp_replicate=2, dp_shard=2),
        MeshConfig(dp_shard=2, tp=2),
        MeshConfig(dp_shard=2, tp=2, ep=4),
        MeshConfig(dp_shard=4, ep=4),
        MeshConfig(dp_shard=2, cp=2),
        MeshConfig(dp_shard=1, cp=2, tp=2),
        MeshConfig(dp_shard=2, pp=2),
    ),
}
LENGTHS = (512, 1024, 2048, 4096)


def config_of(mesh: MeshConfig) -> Config:
    """Return the tiny hybrid, all letters, on rows of `TOKENS` tokens."""
    base, ranks = preset("tiny"), size_of(mesh)
    batch = mesh.dp_replicate * mesh.dp_shard
    micro = 4 if mesh.pp > 1 else 1  # a pipeline needs microbatches
    train = TrainConfig(device_batch_size=max(1, ROWS // (batch * micro)), grad_accum=micro)
    config = dataclasses.replace(
        base, mesh=mesh, train=train, data=DataConfig(seq_len=TOKENS), optim=OptimConfig()
    )
    return resolve(config, ranks)


def size_of(mesh: MeshConfig) -> int:
    """Return the number of ranks of a mesh."""
    return mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.cp * mesh.tp


def name_of(mesh: MeshConfig) -> str:
    """Return the degrees above 1 of a mesh as text."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return " ".join(f"{a}{getattr(mesh, a)}" for a in axes if getattr(mesh, a) > 1) or "one process"


def _steps_of(rank: int, size: int, mesh: MeshConfig, steps: int) -> dict[str, Any]:
    """Return seconds of each step after two unmeasured ones, and bytes of own parameters."""
    torch.set_num_threads(1)
    world = World(0, 1, CPU) if size == 1 else join(mesh, CPU)
    config = config_of(mesh)
    model = build_model(config, world)
    optimizer = build_optimizer(model, config, world.holders)
    boundary = AccumulationBoundary(model, world, config)
    seconds = []
    for step in range(steps + 2):
        rows = range(step * ROWS, (step + 1) * ROWS)
        shares = micro_rows(rows, world, config.train.device_batch_size)
        batches = [ragged_batch(share, TOKENS, config.model.vocab_size) for share in shares]
        if size > 1:
            dist.barrier()
        began = time.perf_counter()
        boundary.accumulate(batches)
        clip_gradients(model.parameters(), config.optim.clip_norm, copies=boundary.copies)
        optimizer.step()
        optimizer.zero_grad()
        boundary.finish_step()
        seconds.append(time.perf_counter() - began)
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return {"seconds": seconds[2:], "bytes": sum(p.numel() * p.element_size() for p in local)}


def measure_meshes(ranks: list[int], steps: int) -> list[dict[str, Any]]:
    """Return one row per mesh: median step, ratio to one process, parameter bytes of rank 0."""
    rows = []
    for mesh in (ONE, *(m for n in ranks for m in MESHES[n]), ONE):
        size = size_of(mesh)
        found = (
            _steps_of(0, 1, mesh, steps)
            if size == 1
            else run_ranks(_steps_of, size, mesh, steps, timeout_s=600)[0]
        )
        median = statistics.median(found["seconds"])
        rows.append(
            {
                "mesh": name_of(mesh),
                "ranks": size,
                "step_s": median,
                "tokens_per_s": ROWS * TOKENS / median,
                "parameter_bytes": found["bytes"],
            }
        )
    one = (rows[0]["step_s"] + rows[-1]["step_s"]) / 2
    return [{**row, "of_one_process": row["step_s"] / one} for row in rows]


def _mixer_seconds(rank: int, size: int, letter: str, tokens: int, mesh: MeshConfig) -> float:
    """Return median seconds of forward and backward of one mixer on one row."""
    torch.set_num_threads(1)
    model_config = dataclasses.replace(preset("tiny").model, pattern=letter, depth=1)
    model = meta_model(model_config).to_empty(device=CPU)
    initialise(model, model.init_rules(), 1)
    docs = Documents.rows(1, tokens)
    x_BTD = torch.randn(1, tokens, model_config.dim, generator=torch.Generator().manual_seed(0))
    if size > 1:
        world = join(mesh, CPU)
        layout = ContextLayout.for_rank(mesh.cp_order, world.coordinate("cp"), size)
        for name, style in context_plan(model, mesh, layout).items():
            style._apply(model.get_submodule(name), world.meshes["cp"])
        index = layout.index(tokens)
        docs, x_BTD = docs.take(index), x_BTD[:, index]
    mixer, seconds = model.get_submodule("blocks.0.mixer"), []
    for _ in range(5):
        x = x_BTD.detach().requires_grad_()
        if size > 1:
            dist.barrier()
        began = time.perf_counter()
        mixer(x, docs).sum().backward()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def measure_lengths(ranks: int) -> list[dict[str, Any]]:
    """Return seconds by sequence length: ring attention against the handoff of a Mamba state."""
    mesh = MeshConfig(dp_shard=1, cp=ranks, cp_attention="ring", cp_mamba3="state")
    m = preset("tiny").model
    heads, kv = m.mamba3.expand * m.dim // m.mamba3.headdim, m.attention.num_kv_heads
    state_bytes = 4 * heads * m.mamba3.headdim * m.mamba3.d_state
    rows = []
    for tokens in LENGTHS:
        row: dict[str, Any] = {"tokens": tokens}
        for letter, name in (("A", "ring attention"), ("M", "Mamba-3 handoff")):
            row[f"{name}, one process"] = _mixer_seconds(0, 1, letter, tokens, ONE)
            row[name] = max(run_ranks(_mixer_seconds, ranks, letter, tokens, mesh, timeout_s=600))
        row["kv bytes sent"] = (ranks - 1) * tokens // ranks * 2 * kv * m.attention.head_dim * 4
        row["state bytes sent"] = 2 * state_bytes  # two chunks a rank in head-tail order
        rows.append(row)
    return rows


def main() -> None:
    """Run the benchmark from the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=["meshes", "lengths"])
    parser.add_argument("--ranks", type=int, nargs="+", choices=[2, 4], default=[2, 4])
    parser.add_argument("--steps", type=int, default=6, help="measured steps (default 6)")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.only != "lengths":
        found["meshes"] = measure_meshes(options.ranks, options.steps)
    if options.only != "meshes":
        found["lengths"] = measure_lengths(2)
    print("\n\n".join(_tables(found)))


def _tables(found: dict[str, Any]) -> list[str]:
    tables = []
    if "meshes" in found:
        lines = [
            f"{'mesh':28} {'ranks':>5} {'step s':>8} {'tokens/s':>9} {'ratio':>6} {'MB here':>8}"
        ]
        lines += [
            f"{r['mesh']:28} {r['ranks']:5} {r['step_s']:8.3f} {r['tokens_per_s']:9,.0f} "
            f"{r['of_one_process']:6.2f} {r['parameter_bytes'] / 1e6:8.2f}"
            for r in found["meshes"]
        ]
        tables.append("\n".join(lines))
    if "lengths" in found:
        head = f"{'':8}{'ring attention, cp 2':>24}{'Mamba-3 handoff, cp 2':>26}{'bytes sent':>22}"
        lines = [
            head,
            f"{'tokens':>8}" + f"{'s':>12}{'of one':>12}" * 2 + f"{'K, V':>12}{'state':>12}",
        ]
        for r in found["lengths"]:
            cells = f"{r['tokens']:8}"
            for name in ("ring attention", "Mamba-3 handoff"):
                cells += f"{r[name]:12.3f}{r[name] / r[f'{name}, one process']:12.2f}"
            lines.append(cells + f"{r['kv bytes sent']:12,}{r['state bytes sent']:12,}")
        tables.append("\n".join(lines))
    return tables


if __name__ == "__main__":
    main()
