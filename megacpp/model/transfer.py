"""Copies of the host's numbers to a device, without waiting for its queued work.

A copy from memory that the system may page out waits until it is done, and so for everything that
was put into the device's queue before it. From pinned memory it takes its place in the queue;
torch's allocator of pinned memory keeps what a copy still reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return `x.to(device)`; a copy from the host to a GPU doesn't make the host wait.

    Args:
        x: any shape.
        device: target.
    """
    there = torch.device(device)
    real = type(x) is Tensor and x.device.type == "cpu"
    if real and there.type == "cuda" and torch.cuda.is_available():
        whole = x.contiguous()  # rows may be one row, seen several times
        return whole.pin_memory().to(there, non_blocking=True)
    return x.to(there)


def listed(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor `[len(values)]` of a few numbers that the host knows.

    A compiler makes them constants.
    """
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)
