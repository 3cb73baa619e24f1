"""Triton kernels of RMSNorm: one launch forward, one backward and a sum over its programs.

    n = x / rms(x), y = n w            keeps 1 / rms of each row
    dx = (dy w - n mean(dy w n)) / rms, dw = sum over rows of dy n

Numbers inside are fp32, and results are rounded once. A program of the backward takes every
PROGRAMS-th block of rows and adds up its part of dw, so that sums have one order.

Legend: D normed width; tensors are `(..., D)`, one row per leading index; P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.strides import launch

TILE = 4096  # numbers at a time: 16 for each thread of 8 warps
PROGRAMS = 256  # of the backward: two for each of a large GPU's processors


def forward(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) * weight in `dtype`, and 1 / rms of each row in fp32.

    Args:
        x: `[..., D]`.
        weight_D: factors.
        eps: added to the mean square.
        dtype: of the first result.
    """
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if x.numel():
        x, *places = _places(x)
        blocks = -(-rstd.numel() // _shape(x)["ROWS"])
        given = x, weight_D.contiguous(), y, rstd, rstd.numel(), *places, eps
        launch(_forward_kernel, (blocks,), *given, **_shape(x))
    return y, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight_D: Tensor,
    rstd: Tensor,
    needed: tuple[bool, bool],
    beside: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x `[..., D]` and of the weight, as far as they are needed.

    Args:
        dy: gradient of the result, `[..., D]`.
        x: `[..., D]`.
        weight_D: factors.
        rstd: 1 / rms of each row, `[..., 1]`; a row with 0 overflowed: NaN.
        needed: of which of the two.
        beside: added to the gradient of x, `[..., D]`; None: nothing.
    """
    dx, rows = (
        torch.empty(x.shape if needed[0] else 0, dtype=x.dtype, device=x.device),
        rstd.numel(),
    )
    beside = beside if needed[0] else None
    if not rows:
        return (dx if needed[0] else None), (torch.zeros_like(weight_D) if needed[1] else None)
    (x, *places), (dy, *dy_places) = _places(x), _places(dy)
    programs = min(PROGRAMS, -(-rows // _shape(x)["ROWS"]))
    part_PD = torch.empty(
        programs if needed[1] else 0, x.shape[-1], dtype=torch.float32, device=x.device
    )
    tensors = dy, x, weight_D.contiguous(), rstd, dx, part_PD
    stream = dx if beside is None else beside.contiguous()
    constants = {"DX": needed[0], "DW": needed[1], "ADDED": beside is not None} | _shape(x)
    sizes = rows, *dy_places, *places, programs
    launch(_backward_kernel, (programs,), *tensors, stream, *sizes, **constants)
    return (dx if needed[0] else None), (part_PD.sum(0) if needed[1] else None)


def _shape(x: Tensor) -> dict[str, int]:
    """Return the constants of a launch."""
    block = 1 << (x.shape[-1] - 1).bit_length()
    rows = max(1, TILE // block)
    warps = min(16, max(4, rows * block // 512))
    return {"D": x.shape[-1], "ROWS": rows, "BLOCK": block, "num_warps": warps}


def _places(x: Tensor) -> tuple[Any, ...]:
    """Return x and where its rows begin: row r at r // inner * outer + r % inner * each.

    A tensor that isn't laid out so is copied.
    """
    merged = list[tuple[int, int]]()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        elif size != 1:
            merged.append((size, stride))
    if x.stride(-1) != 1 or len(merged) > 2:
        return x.contiguous(), 1, x.shape[-1], 0
    (_, outer), (inner, each) = [(1, 0), (1, 0), *merged][-2:]
    return x, inner, outer, each


@triton.jit
def _forward_kernel(
    x, weight, y, rstd, rows, inner, outer, each, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    start = row // inner * outer + row % inner * each
    values = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(values * values, 1) / D + eps)
    out = values * r[:, None] * w[None, :]
    place = row[:, None] * D + column[None, :]
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, r, mask=row < rows)


@triton.jit
def _backward_kernel(
    dy, x, weight, rstd, dx, part, beside, rows, dy_inner, dy_outer, dy_each, inner, outer, each,
    programs,
    DX: tl.constexpr, DW: tl.constexpr, ADDED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), programs):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        start = row // inner * outer + row % inner * each
        dy_start = row // dy_inner * dy_outer + row % dy_inner * dy_each
        values = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)
        d = tl.load(dy + dy_start[:, None] + column[None, :], mask=inside, other=0.0)
        d = d.to(tl.float32)
        r = tl.load(rstd + row, mask=row < rows, other=1.0)
        r = r / tl.where(r == 0.0, 0.0, 1.0)  # NaN of 0: its row came out as zeros
        n = values.to(tl.float32) * r[:, None]
        if DW:
            total += d * n
        if DX:
            d = d * w[None, :]
            mean = tl.sum(d * n, 1) / D
            out = (d - n * mean[:, None]) * r[:, None]
            place = row[:, None] * D + column[None, :]
            if ADDED:
                out += tl.load(beside + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + place, out.to(dx.dtype.element_ty), mask=inside)
    if DW:
        tl.store(part + program * D + column, tl.sum(total, 0), mask=column < D)
