"""Triton kernels of a product of 16-bit inputs and a 32-bit weight with few outputs.

    y = x w^T, dx = dy w, dw = dy^T x

Each reads x as it is; torch would write it in 32 bits first, forward and backward. A product is
three in TF32, as exact as one in fp32, and sums are fp32. A program of dw takes every PROGRAMS-th
block of rows, so that sums have one order.

Legend: T rows, D input width, E outputs, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.strides import launch

PROGRAMS = 8  # of the weight's gradient, for each WIDTH numbers of D


def forward(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x w^T `[T, E]` in fp32.

    Args:
        x_TD: 16-bit input.
        weight_ED: fp32 weight.
    """
    y_TE = torch.empty(len(x_TD), len(weight_ED), dtype=torch.float32, device=x_TD.device)
    shape = _shape(weight_ED)
    blocks = -(-len(x_TD) // shape["ROWS"])
    given = x_TD.contiguous(), weight_ED.contiguous(), y_TE, len(y_TE)
    launch(_forward_kernel, (blocks,), *given, **shape)
    return y_TE


def input_gradient(
    dy_TE: Tensor, weight_ED: Tensor, x_TD: Tensor, plus_TD: Tensor | None = None
) -> Tensor:
    """Return dy w `[T, D]` in the dtype of x, with something added to it.

    Args:
        dy_TE: fp32 gradient of the product.
        weight_ED: fp32 weight.
        x_TD: 16-bit input.
        plus_TD: added before the sum is rounded; None: 0.
    """
    dx_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    shape = _shape(weight_ED)
    grid = -(-len(dy_TE) // shape["ROWS"]), -(-weight_ED.shape[1] // shape["WIDTH"])
    given = dx_TD, weight_ED.contiguous(), dy_TE.contiguous(), len(dy_TE)
    plus = dx_TD if plus_TD is None else plus_TD.contiguous()
    launch(_input_kernel, grid, *given, plus, PLUS=plus_TD is not None, **shape)
    return dx_TD


def weight_gradient(dy_TE: Tensor, x_TD: Tensor) -> Tensor:
    """Return dy^T x `[E, D]` in fp32.

    Args:
        dy_TE: fp32 gradient of the product.
        x_TD: 16-bit input.
    """
    part_PED = dy_TE.new_empty(PROGRAMS, dy_TE.shape[1], x_TD.shape[1])
    shape = _shape(part_PED[0])
    grid = -(-x_TD.shape[1] // shape["WIDTH"]), PROGRAMS
    given = x_TD.contiguous(), part_PED, dy_TE.contiguous(), len(dy_TE)
    launch(_weight_kernel, grid, *given, **shape)
    return part_PED.sum(0)


def _shape(weight_ED: Tensor) -> dict[str, int]:
    """Return the constants of a launch: the largest tiles that stay in registers."""
    block = max(16, 1 << (len(weight_ED) - 1).bit_length())
    few = block <= 32
    width = 64 if block <= 128 else 32
    found = {"D": weight_ED.shape[1], "E": len(weight_ED), "BLOCK": block, "WIDTH": width}
    return found | {"ROWS": 64 if few else 32, "num_warps": 4 if few else 8}


@triton.jit
def _tile(start, row, rows, column, width: tl.constexpr):
    """Return the numbers of some rows and columns of a matrix, in fp32, 0 outside."""
    place = start + row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x, w, y, rows, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, D, WIDTH):
        column = first + tl.arange(0, WIDTH)
        x_tile = _tile(x, row, rows, column, D)
        w_tile = _tile(w, output, E, column, D)
        total += tl.dot(x_tile, tl.trans(w_tile), input_precision="tf32x3")
    place = y + row.to(tl.int64)[:, None] * E + output[None, :]
    tl.store(place, total, mask=(row < rows)[:, None] & (output < E)[None, :])


@triton.jit
def _input_kernel(
    dx, w, dy, rows, plus, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, E, min(BLOCK, 64)):
        output = first + tl.arange(0, min(BLOCK, 64))
        dy_tile = _tile(dy, row, rows, output, E)
        w_tile = _tile(w, output, E, column, D)
        total += tl.dot(dy_tile, w_tile, input_precision="tf32x3")
    if PLUS:
        total += _tile(plus, row, rows, column, D)
    place = dx + row.to(tl.int64)[:, None] * D + column[None, :]
    inside = (row < rows)[:, None] & (column < D)[None, :]
    tl.store(place, total.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _weight_kernel(
    x, part, dy, rows, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    output = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        dy_tile = _tile(dy, row, rows, output, E)
        x_tile = _tile(x, row, rows, column, D)
        total += tl.dot(tl.trans(dy_tile), x_tile, input_precision="tf32x3")
    start = part + tl.program_id(1).to(tl.int64) * E * D
    place = start + output[:, None] * D + column[None, :]
    tl.store(place, total, mask=(output < E)[:, None] & (column < D)[None, :])
