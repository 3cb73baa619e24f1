"""Seconds of work on a device: CUDA events on a GPU, perf_counter on a CPU; medians."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch


def settle(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return seconds of one call, from an idle device to an idle device."""
    settle(device)
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def median_s(
    run: Callable[[], object], device: torch.device, warm: int, repeats: int, most_s: float = 60.0
) -> float:
    """Return median seconds of a call after warm-up.

    Args:
        run: function to measure.
        device: device to wait for.
        warm: unmeasured calls.
        repeats: measured calls; fewer if they would take longer than `most_s`, at least one.
        most_s: limit in seconds.
    """
    for _ in range(warm):
        run()
    settle(device)
    found = [timed(run, device)]
    while len(found) < repeats and sum(found) + found[-1] < most_s:
        found.append(timed(run, device))
    return statistics.median(found)


def fresh(device: torch.device) -> None:
    """Free all unused memory and reset the peaks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that had a product
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
