"""Memory of a step in a real allocator, beside the watch, the recorded history and the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.gpu.clock import fresh
from bench.gpu.steps import Steps, beside_estimate, in_use
from checkpointing.tracing.watch import StepWatch
from megacpp.config.checks.every import resolve
from megacpp.config.presets import preset
from megacpp.config.schema import KEEP, CheckpointingPolicy, Config, DataConfig, TrainConfig
from megacpp.memory.estimate import estimate
from megacpp.run.forensics import allocator_state
from parallel.mesh import World
from tests.gpu.devices import on_any_device
from tests.gpu.trainer import ACCUM, Settings, Trainer

BLOCK = 512  # bytes that the caching allocator rounds up to
WORKSPACES = 2 * (32 << 20) + (8 << 20)  # of cuBLAS and cuBLASLt on Hopper


@on_any_device
def test_a_followed_step_is_what_the_allocator_saw(device: torch.device) -> None:
    """Compare the watch's requested bytes with the allocator's, which rounds each up to a block."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    trainer = Trainer(Settings(dtype=dtype).config, World(0, 1, device))  # type: ignore[arg-type]
    trainer.step()
    batches = list(trainer.loader.take(ACCUM))
    watch = StepWatch(trainer.model, trainer.optimizer)
    fresh(device)
    with watch:
        trainer.forward_backward(batches, 1)
        trainer.optimizer.step()
    stream = watch.stream()
    _, peak = stream.peak()
    resting = sum(watch.rest().values())
    assert peak > resting > 0
    state = allocator_state(device, resting)
    if device.type == "cuda":
        most = state["allocated_bytes"]
        assert peak <= most + BLOCK
        assert most <= peak + BLOCK * len(stream.events) + WORKSPACES
    else:
        assert state == {}


@on_any_device
def test_recorded_history(device: torch.device) -> None:
    """torch's own record of allocations adds up to the peak that the allocator reports."""
    trainer = Trainer(Settings(dtype="fp32").config, World(0, 1, device))
    trainer.step()
    fresh(device)
    before = 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    trainer.step()
    if device.type == "cuda":
        trace = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
        peak = before + most_of(trace)
        assert abs(peak - torch.cuda.max_memory_allocated(device)) <= BLOCK * 64
    assert most_of([("alloc", 5), ("alloc", 7), ("free_completed", 5), ("alloc", 1)]) == 12


def most_of(trace: list[Any]) -> int:
    """Return the most bytes beyond those at the start, of entries of a memory history."""
    now = most = 0
    for entry in trace:
        action, size = (entry["action"], entry["size"]) if isinstance(entry, dict) else entry
        now += {"alloc": size, "free_completed": -size}.get(action, 0)
        most = max(most, now)
    return most


def run_of(name: str, device: torch.device, policy: CheckpointingPolicy) -> Config:
    """Return a preset with few rows; on a CPU very short ones."""
    base, cpu = preset(name), device.type == "cpu"
    few = replace(base.model, depth=2, vocab_size=512, dim=64) if cpu else base.model
    config = replace(
        base,
        model=few,
        data=DataConfig(seq_len=32 if cpu else 2048),
        train=TrainConfig(device_batch_size=1 if cpu else 4, grad_accum=2),
        optim=replace(base.optim, qk_clip=0.0),
        recompute=policy,
        memory=replace(base.memory, calibration=""),
    )
    return resolve(config, 1)


@on_any_device
@pytest.mark.parametrize("name", ["dense_110m", "moe_small", "hybrid_400m"])
def test_estimate_beside_the_peak(device: torch.device, name: str) -> None:
    """Compare the gate's estimate: within 3 % of the bytes in use, never above `upper`.

    Context and libraries are constants of the estimate (some 0.7 GiB), so models of a few GiB test
    these too. On a CPU nothing is measured; the two ways to the same estimate agree.
    """
    config = run_of(name, device, KEEP)
    fresh(device)
    steps = Steps(config, device, packed=True)
    for _ in range(2):
        steps.step()
    row = beside_estimate(config, device)
    if device.type == "cpu":
        assert in_use(device) == {} and row["estimate_gib"] == pytest.approx(
            estimate(on_cpu(config), 1).point / 2**30
        )
        return
    assert row["upper_held"], row
    assert abs(float(row["estimate_off"] or 0.0)) <= 0.03, row


def on_cpu(config: Config) -> Config:
    train, precision = replace(config.train, device="cpu"), replace(config.precision, dtype="fp32")
    return replace(config, train=train, precision=precision)
