"""Profile of the slowest model: kernels by time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from bench.gpu.clock import fresh, settle, timed
from bench.gpu.models import config_of
from bench.gpu.record import GpuRecord, Row
from bench.gpu.shapes import MODELS
from bench.gpu.steps import Steps
from megacpp.config.schema import Config

TOP = 10
LONGEST = 100  # of a name


def profile(record: GpuRecord, wanted: list[str]) -> None:
    """Profile one microbatch and one update of the model with the lowest MFU, or of those named."""
    for name in wanted or [slowest(record.rows)]:
        config = config_of(name, record)
        record.attempt("profile", name, "", lambda c=config: run(c, record.device))
        fresh(record.device)


def slowest(rows: list[Row]) -> str:
    """Return the eager model with the fewest FLOPs a second; by default the hybrid."""
    found = {
        row["name"]: row["tflops"]
        for row in rows
        if row["section"] == "models" and row["mode"] == "eager" and row["name"] in MODELS
    }
    return min(found, key=found.__getitem__) if found else "hybrid"


def run(config: Config, device: torch.device) -> Iterator[Row]:
    """Yield the table of a profiled step."""
    fresh(device)
    steps = Steps(config, device, packed=False)
    steps.step()
    settle(device)
    # Kernels alone on a GPU: operators of a host that sends 100,000 of them would take minutes.
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as prof:
        wall_s = timed(lambda: (steps.one_pass(), steps.update()), device)
    yield from top(prof.key_averages(), device, wall_s)


def top(averages: Any, device: torch.device, wall_s: float) -> list[Row]:
    """Return the rows of the table: kernels on a GPU, operators on a CPU, most time first.

    `busy` is their total time over that of the step: below 1, the device idled in the rest.
    """
    on_gpu = device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    own = [e for e in averages if e.device_type == kind and not e.is_user_annotation]
    total = sum(getattr(e, key) for e in own)
    own.sort(key=lambda e: -getattr(e, key))
    return [
        {
            "mode": " ".join(e.key.split())[:LONGEST],
            "calls": e.count,
            "device_ms": getattr(e, key) / 1e3,
            "share": getattr(e, key) / total if total else 0.0,
            "busy": total / 1e6 / wall_s,
        }
        for e in own[:TOP]
    ]
