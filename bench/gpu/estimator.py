"""Memory of real steps beside what the launch gate expects of them, over a grid of runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.gpu.clock import fresh
from bench.gpu.record import GpuRecord, Row
from bench.gpu.shapes import ready
from bench.gpu.steps import Steps, beside_estimate
from megacpp.config.presets import PER_BLOCK, preset
from megacpp.config.schema import KEEP, Config

# preset, rows, tokens, what is kept, optimizer
GRID = (
    ("dense_110m", 16, 1024, "all", "muon_adamw"),
    ("dense_110m", 8, 4096, "all", "adamw"),
    ("moe_small", 8, 2048, "preset", "muon_adamw"),
    ("moe_small", 4, 4096, "all", "adamw"),
    ("hybrid_400m", 2, 4096, "preset", "muon_adamw"),
    ("hybrid_400m", 1, 4096, "all", "adamw"),
    ("nam56r_quarter", 1, 4096, "preset", "muon_adamw"),
    ("nam56r_quarter", 1, 2048, "all", "adamw"),
)
KEPT = {"all": KEEP, "blocks": PER_BLOCK}


def estimator(record: GpuRecord, wanted: list[str]) -> None:
    """Run two steps of every point of the grid: the second is as full as any."""
    for point in GRID[1::4] if record.tiny else GRID:
        name, rows, tokens, kept, optimizer = point
        if wanted and name not in wanted:
            continue
        words = f"{name}, {rows} x {tokens}, keeps {kept}, {optimizer}"
        config = ready(_config_of(*point), record.tiny)
        record.attempt("estimator", words, "", lambda c=config: run(c, record.device))
        fresh(record.device)


def _config_of(name: str, rows: int, tokens: int, kept: str, optimizer: str) -> Config:
    """Return the configuration of a point of the grid."""
    base = preset(name)
    train = replace(base.train, device_batch_size=rows, tokens_per_step=0, grad_accum=2)
    policy = base.recompute if kept == "preset" else KEPT[kept]
    return replace(
        base,
        data=replace(base.data, seq_len=tokens),
        train=train,
        optim=replace(base.optim, name=optimizer, qk_clip=0.0),  # type: ignore[arg-type]
        recompute=policy,
    )


def run(config: Config, device: torch.device) -> Iterator[Row]:
    """Yield the memory of two steps beside the estimate."""
    fresh(device)
    steps = Steps(config, device, packed=True)
    for _ in range(2):
        steps.step()
    yield beside_estimate(config, device)
