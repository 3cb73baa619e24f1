"""Whole models: tokens/s, TFLOP/s and MFU of a step, and its memory beside the estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from bench.gpu.clock import fresh, median_s
from bench.gpu.record import GpuRecord, Row
from bench.gpu.shapes import CHOICES, MODELS, ready
from bench.gpu.steps import (
    CapturedSteps,
    Steps,
    beside_estimate,
    compiled,
    fitted,
    graph_unsupported_reason,
)
from megacpp.config.schema import Config, PrecisionConfig
from megacpp.errors import ConfigError
from megacpp.model.flops import train_flops_per_token
from megacpp.model.precision import compute_dtype
from megacpp.run.metrics import device_peak_flops

TINY = ("dense_1b", "hybrid")  # a kind of each
MODES = ("eager", "eager, packed", "inductor", "graph", "inductor, graph")


def models(
    record: GpuRecord,
    wanted: list[str],
    modes: Sequence[str] = MODES,
    fp8: Literal["off", "torchao"] = "off",
) -> None:
    """Measure every model in every mode that is legal for it.

    Args:
        record: record of the run.
        wanted: names of models; empty: all.
        modes: to measure.
        fp8: library of FP8 products, scaled by row.
    """
    for name in wanted or (TINY if record.tiny else MODELS):
        if name not in CHOICES:
            record.skip("models", name, "", f"no such model: {', '.join(CHOICES)}")
            continue
        try:
            config = config_of(name, record, fp8)
        except ConfigError as error:
            record.skip("models", name, "", str(error))
            continue
        for mode in modes:
            _one(record, name, mode + (", fp8" if fp8 != "off" else ""), config)


def config_of(name: str, record: GpuRecord, fp8: Literal["off", "torchao"] = "off") -> Config:
    """Return a model ready to run, as deep and with as many rows as the device takes.

    Args:
        name: of `CHOICES`.
        record: record of the run.
        fp8: library of FP8 products, scaled by row.

    Raises:
        ConfigError: it doesn't fit, or its FP8 can't run.
    """
    precision = PrecisionConfig(fp8=fp8, fp8_recipe="rowwise", fp8_local_scales=True)
    made = (make() for make in CHOICES[name])
    if fp8 != "off":
        made = (replace(config, precision=precision) for config in made)
    depth = 3 if name == "hybrid_13" else 12
    return fitted((ready(config, record.tiny, depth) for config in made), record.device)


def _one(record: GpuRecord, name: str, mode: str, config: Config) -> None:
    """Measure one model in one mode."""
    device = record.device
    if "inductor" in mode:
        config = compiled(config, record.tiny)
    why = graph_unsupported_reason(config, device) if "graph" in mode else None
    if "inductor" in mode and not set(config.model.pattern) & set("AFE"):
        why = "nothing of it is compiled"
    if why is not None:
        record.skip("models", name, mode, why)
    else:
        record.attempt("models", name, mode, lambda: _run(config, device, mode, record.tiny))
    torch.compiler.reset()
    fresh(device)


def _run(config: Config, device: torch.device, mode: str, is_tiny: bool) -> Iterator[Row]:
    """Yield the figures of one mode after a warm-up microbatch and step."""
    fresh(device)
    if "graph" in mode:
        captured = CapturedSteps(config, device)
        with captured.on_stream():
            yield measured(captured, is_tiny) | {"first_s": None}  # compiled before it was captured
        return
    steps = Steps(config, device, packed="packed" in mode)
    row = measured(steps, is_tiny)
    yield row | beside_estimate(config, device)


def measured(steps: Steps, is_tiny: bool) -> Row:
    """Return seconds of a pass, of the update and of a step; rates by counted FLOPs."""
    config, device = steps.config, steps.device
    repeats = 2 if is_tiny else 3
    first_s = median_s(steps.step, device, warm=0, repeats=1)  # compiles, tunes, makes workspaces
    step_s = median_s(steps.step, device, warm=0, repeats=repeats, most_s=20)
    pass_s = median_s(steps.one_pass, device, warm=0, repeats=repeats, most_s=10)
    optimizer_s = median_s(steps.update, device, warm=0, repeats=1)
    tokens = config.train.device_batch_size * config.data.seq_len
    number = config.train.grad_accum
    flops = train_flops_per_token(config.model, config.data.seq_len)
    peak, muon = device_peak_flops(device), steps.muon_flops()
    return {
        "depth": config.model.depth,
        "parameters": steps.parameters,
        "rows": config.train.device_batch_size,
        "seq_len": config.data.seq_len,
        "grad_accum": number,
        "dtype": str(compute_dtype(config.precision, device)).removeprefix("torch."),
        "flops_per_token": flops,
        "muon_share": muon / (muon + flops * tokens * number),
        "step_s": step_s,
        "pass_s": pass_s,
        "optimizer_s": optimizer_s,
        "first_s": first_s,
        "tokens_per_s": tokens * number / step_s,
        "tflops": flops * tokens * number / step_s / 1e12,
        "pass_tflops": flops * tokens / pass_s / 1e12,
        "mfu": flops * tokens * number / step_s / peak if peak else None,
    }
