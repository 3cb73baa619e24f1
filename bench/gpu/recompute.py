"""Recompute setups on a GPU: seconds, saved bytes and the peak of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.clock import fresh, median_s
from bench.gpu.record import GpuRecord, Row
from bench.gpu.shapes import hybrid, ready
from bench.gpu.steps import GIB
from bench.recompute import fits, memory
from bench.step import Trainer
from megacpp.config.schema import Config
from megacpp.lessons.recompute import CHOICES, KEEP_ALL, RecomputeSetup
from parallel.mesh import World

NAME = "hybrid, 13 layers"


def recompute(record: GpuRecord, wanted: list[str]) -> None:
    """Measure one model under every setup of lessons/recompute.py, and mark the Pareto front."""
    config = ready(hybrid(13), record.tiny)
    for choice in CHOICES[:: 3 if record.tiny else 1]:
        if wanted and choice.name not in wanted:
            continue
        if not fits(choice, config):
            record.skip("recompute", NAME, choice.name, "the model has nothing for it")
            continue
        record.attempt("recompute", NAME, choice.name, lambda c=choice: run(c, config, record))
        fresh(record.device)
    rows = [row for row in record.rows if row["section"] == "recompute"]
    mark(rows)
    record.save()


def run(choice: RecomputeSetup, config: Config, record: GpuRecord) -> Iterator[Row]:
    """Yield figures of one microbatch, forward and backward."""
    device, config = record.device, choice.apply(config)
    fresh(device)
    trainer = Trainer(config, World(0, 1, device), choice.build(config, device))
    shape = config.train.device_batch_size, config.data.seq_len
    g = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(config.model.vocab_size, shape, generator=g).to(device)

    def one_pass() -> None:
        trainer.accumulate(ids_BT, ids_BT)
        trainer.optimizer.zero_grad()

    one_pass()
    found = memory(trainer, ids_BT, trainer.world)
    seconds = median_s(one_pass, device, warm=1, repeats=2 if record.tiny else 4, most_s=15)
    yield {
        "pass_s": seconds,
        "kept_gib": found["kept_mib"] * 2**20 / GIB,
        "peak_gib": found["peak_mib"] * 2**20 / GIB,
    }


def mark(rows: list[Row]) -> None:
    """Add ratios to saving everything, and whether a setup is on the Pareto front."""
    plain = next((row for row in rows if row["mode"] == KEEP_ALL.name), None)
    for row in rows:
        row["front"] = not any(
            other["pass_s"] <= row["pass_s"] and other["peak_gib"] < row["peak_gib"]
            for other in rows
        )
        if plain is not None:
            row["time_ratio"] = row["pass_s"] / plain["pass_s"]
            row["peak_ratio"] = row["peak_gib"] / plain["peak_gib"]
