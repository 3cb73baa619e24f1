"""Layouts that Triton kernels take, and their launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.graph_operator import NO_LAUNCH


def side_by_side(x: Tensor) -> Tensor:
    """Return x, of any shape, with its last dim contiguous; all else may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


def launch(kernel: Any, grid: tuple[Any, ...], x: Tensor, *given: Any, **constants: Any) -> None:
    """Launch a Triton kernel, unless its grid is empty, on the device of its first tensor.

    Args:
        kernel: takes `x`, of any shape, and `given`.
        grid: programs along each of its axes.
        constants: what it is compiled for.

    Raises:
        RuntimeError: the device is no GPU, and Triton's interpreter is off.
    """
    if NO_LAUNCH.get():
        return
    if not (x.is_cuda or x.is_meta):
        from triton import knobs

        if not knobs.runtime.interpret:
            raise RuntimeError(f"triton has no kernels for {x.device.type}")
    if 0 not in grid:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            kernel[grid](x, *given, **constants)
