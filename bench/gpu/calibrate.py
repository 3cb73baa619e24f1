"""Measure this machine for the time model: products by shape, memory, start of an operator.

    python -m bench.gpu --calibrate                 # to the user's cache: runs then predict
    python -m bench.gpu --calibrate --out mine.json # megacpp speed PRESET --gpu mine.json
    torchrun --standalone --nproc-per-node=2 -m bench.gpu --calibrate   # two processes at once

Processes of a CPU share its memory and its clock, so a run of two is predicted from what two
measured at once, their exchange included, with as many threads each (OMP_NUM_THREADS). Links
between GPUs aren't measured: they are those of the known GPU.
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
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from checkpointing.tracing.operators import kind_of
from megacpp.blocks.attention.config import AttentionConfig
from megacpp.config.schema import ModelConfig
from megacpp.launch.record import device_name
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.run.predicted import machine_file
from megacpp.speed.collectives import START_US
from megacpp.speed.hardware import GpuSpec, known

GPU_SIZES = (1024, 2048, 4096, 8192)
CPU_SIZES = (16, 64, 256, 1024)  # of a layer's input and output; tokens are 4 times as many
TRIES = 7
FEW_TOKENS, BLOCKS = 16, 50  # of blocks whose operators' start is timed
SENT = 1 << 20  # numbers that a timed exchange gathers and sums
EXCHANGES, PRODUCTS = 20, 16  # timed exchanges, and products of the work before each


def calibrate(device: torch.device, out: Path | None, tiny: bool = False) -> dict[str, Any]:
    """Measure a device and write its file.

    Args:
        device: to measure.
        out: file; None: the one that runs on this machine read.
        tiny: small products alone, to try the code.
    """
    content = measure(device, tiny)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    path = out or machine_file(device.type, ranks)
    if ranks == 1 or dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    return {"file": str(path), **content}


def measure(device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Return what the file of a device holds; all ranks of a process group measure at once."""
    cpu = device.type == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    sizes = CPU_SIZES[: 2 if tiny else None] if cpu else GPU_SIZES
    shapes = [(m, m, m) for m in sizes] + [(4 * m, m, m) for m in sizes]
    if cpu:
        shapes = [(4 * m, n, k) for m in sizes for n in sizes for k in sizes]
    if cpu and dist.is_initialized():
        dist.barrier()
    products = [row for shape in shapes for row in _products(shape, dtype, device)]
    best = max(row[-1] for row in products)
    moved = torch.empty(1 << (24 if cpu else 28), device=device)
    pass_s = _seconds(lambda: moved.mul_(1.0), device)
    figures = _base(device)
    figures |= {
        "bf16_tflops": best if cpu else figures["bf16_tflops"],
        "bf16_reached": 1.0 if cpu else best / figures["bf16_tflops"],
        "hbm_gbs": 2 * moved.numel() * 4 / pass_s / 1e9,
        "hbm_reached": 1.0,
        "launch_us": 1e6 * _start_of_an_operator(device),
    }
    if cpu and dist.is_initialized():
        figures |= _link(device)
    return {"device": device_name(device), "figures": figures, "products": products}


def _start_of_an_operator(device: torch.device) -> float:
    """Return seconds of an operator that computes next to nothing, as a model's block issues it."""
    model = ModelConfig(dim=64, attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=64))
    block = Block("A", model).to(device)
    docs = Documents.rows(1, FEW_TOKENS, device)
    x_BTD = torch.randn(1, FEW_TOKENS, model.dim, device=device, requires_grad=True)

    def work() -> None:
        block(x_BTD, docs).sum().backward()

    with OperatorCount() as count:
        work()
    return _seconds(work, device, BLOCKS) / count.ran


class OperatorCount(TorchDispatchMode):
    """Counter of operators that are no views, in `ran`."""

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        self.ran += not kind_of(func).view
        return func(*args, **(kwargs or {}))


def _link(device: torch.device) -> dict[str, float]:
    """Return speed and latency of a hop between processes, from what FSDP2 sends for a block.

    The latency is that behind work, when processes wait for each other.
    """
    ranks = dist.get_world_size()
    x_TD, w_DD = torch.randn(1024, 256, device=device), torch.randn(256, 256, device=device)

    def computed() -> None:
        for _ in range(PRODUCTS):
            torch.mm(x_TD, w_DD)

    def sent(numbers: int, between: Callable[[], None] = lambda: None) -> float:
        own = torch.zeros(numbers, device=device)
        every = torch.zeros(numbers * ranks, device=device)

        def work() -> None:
            between()
            dist.all_gather_into_tensor(every, own)
            between()
            dist.reduce_scatter_tensor(own, every)

        return _seconds(work, device, EXCHANGES)

    few, many = sent(1), sent(SENT // ranks)
    late = sent(1, computed) - 2 * _seconds(computed, device, EXCHANGES)
    passes = 2 * (ranks - 1)  # round the ring
    return {
        "nvlink_gbs": 4 * SENT * passes / ranks / max(many - few, 1e-9) / 1e9,
        "node_latency_us": max(1e6 * max(few, late) - 2 * START_US, 0.0) / passes,
    }


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


def _products(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[list[Any]]:
    """Return TFLOP/s of a linear layer's three products, by layout.

    Args:
        shape: tokens, outputs, inputs.
        dtype: of the operands.
        device: to measure.
    """
    m, n, k = shape
    x, w = (torch.randn(s, device=device, dtype=dtype) for s in ((m, k), (n, k)))
    y = torch.randn(m, n, device=device, dtype=dtype)
    found: list[list[Any]] = []
    for layout, dims, work in (
        ("TN", (m, n, k), lambda: x @ w.T),
        ("NN", (m, k, n), lambda: y @ w),
        ("NT", (n, k, m), lambda: y.T @ x),
    ):
        found.append([*dims, layout, 2 * m * n * k / _seconds(work, device) / 1e12])
    return found


def _seconds(work: Callable[[], object], device: torch.device, tries: int = TRIES) -> float:
    """Return the median time of a piece of work, after one that isn't counted."""
    times = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
