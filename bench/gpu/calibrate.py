"""Measure this machine for the time model: products by shape, memory, start of an operator.

    python -m bench.gpu --calibrate                 # to the user's cache: runs then predict
    python -m bench.gpu --calibrate --out mine.json # megacpp speed PRESET --gpu mine.json

Links between devices aren't measured: they are those of the known GPU, or of this CPU's memory.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megacpp.launch.record import device_name
from megacpp.run.predicted import machine_file
from megacpp.speed.hardware import GpuSpec, known

GPU_SIZES = (1024, 2048, 4096, 8192)
CPU_SIZES = (64, 128, 256, 512, 1024)
TRIES = 7


def calibrate(device: torch.device, out: Path | None, tiny: bool = False) -> dict[str, Any]:
    """Measure a device and write its file.

    Args:
        device: to measure.
        out: file; None: the one that runs on this machine read.
        tiny: small products alone, to try the code.
    """
    cpu = device.type == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    sizes = CPU_SIZES[: 3 if tiny else None] if cpu else GPU_SIZES
    products = [row for m in sizes for row in _products(m, dtype, device)]
    best = max(row[-1] for row in products)
    moved = torch.empty(1 << (24 if cpu else 28), device=device)
    small = torch.zeros(64, device=device)
    pass_s = _seconds(lambda: moved.mul_(1.0), device)
    figures = _base(device)
    figures |= {
        "bf16_tflops": best if cpu else figures["bf16_tflops"],
        "bf16_reached": 1.0 if cpu else best / figures["bf16_tflops"],
        "hbm_gbs": 2 * moved.numel() * 4 / pass_s / 1e9,
        "hbm_reached": 1.0,
        "launch_us": 1e6 * _seconds(lambda: [small.add(1.0) for _ in range(100)], device) / 100,
    }
    path = out or machine_file(device.type)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": device_name(device), "figures": figures, "products": products}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return {"file": str(path), **content}


def _base(device: torch.device) -> dict[str, Any]:
    """Return figures that aren't measured."""
    if device.type == "cpu":
        return {
            **dict.fromkeys((f.name for f in fields(GpuSpec)[1:16]), 0.0),
            "sms": 1,
            "nvlink_gbs": 2.0,
            "nvlink_reached": 1.0,
            "network_gbs": 1.0,
            "network_reached": 1.0,
            "node_latency_us": 100.0,
            "network_latency_us": 100.0,
            "per_node": 1024,
            "on_host": True,
        }
    spec = known(device_name(device)) or known("H100")
    assert spec is not None
    return {f.name: getattr(spec, f.name) for f in fields(GpuSpec)[1:]}


def _products(size: int, dtype: torch.dtype, device: torch.device) -> list[list[Any]]:
    """Return TFLOP/s of square and flat products in the layouts of a linear layer."""
    found: list[list[Any]] = []
    for m, n, k in ((size, size, size), (4 * size, size, size)):
        x, w = (torch.randn(s, device=device, dtype=dtype) for s in ((m, k), (n, k)))
        y = torch.randn(m, n, device=device, dtype=dtype)
        for layout, work in (
            ("TN", lambda x=x, w=w: x @ w.T),
            ("NN", lambda y=y, w=w: y @ w),
            ("NT", lambda x=x, y=y: y.T @ x),
        ):
            shape = {"TN": (m, n, k), "NN": (m, k, n), "NT": (n, k, m)}[layout]
            found.append([*shape, layout, 2 * m * n * k / _seconds(work, device) / 1e12])
    return found


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a piece of work, after one that isn't counted."""
    times = []
    for _ in range(TRIES + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
