"""Triton kernels of the short convolution and its SiLU: one launch each way, and a sum backward.

    y_t = sum_j w[K-1-j] x_(t - j d), out = silu(y)          over the tokens of t's own document
    g = dout silu'(y), dx_t = sum_j w[K-1-j] g_(t + j d), dw[K-1-j] = sum_t g_t x_(t - j d)

Numbers inside are fp32, and results are rounded once. Only x is kept: backward computes y again, of
a token as often as there are taps, which costs less than storing it. Each program of the backward
adds up its part of dw, so that sums have one order.

Legend: B rows, T tokens of a row, C channels, K taps; P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.graph_operator import graph_operator
from megacpp.kernels.strides import launch, side_by_side
from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable

TOKENS, CHANNELS, WARPS = 32, 64, 8  # of a tile: 8 numbers for each thread
PROGRAMS = 4096  # of the backward, at most: some for each of a GPU's processors


def causal_conv(
    x_BTC: Tensor, weight_C1K: Tensor, docs: Documents | None, activation: str | None, dilation: int
) -> Tensor:
    """Return `causal_conv` of causal_conv.py, `[B, T, C]`.

    Args:
        x_BTC: inputs.
        weight_C1K: stored as `nn.Conv1d(groups=C)` stores it.
        docs: documents; None: one per row.
        activation: `silu`; None: none.
        dilation: tokens from tap to tap.
    """
    positions_BT = None if docs is None or docs.whole else docs.positions_BT
    how = activation is not None, dilation
    return _Convolution.apply(x_BTC, weight_C1K, positions_BT, *how)  # type: ignore[return-value]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_C1K: Tensor, positions_BT: Tensor | None, *how: Any
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, weight_C1K)
        ctx.how = positions_BT, *how
        return forward(x_BTC, weight_C1K, positions_BT, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(grads[0], *ctx.saved_tensors, *ctx.how), None, None, None


def forward(
    x_BTC: Tensor, weight_C1K: Tensor, positions_BT: Tensor | None, silu: bool, dilation: int
) -> Tensor:
    """Return the convolution `[B, T, C]` in the dtype of `x_BTC`.

    Args:
        x_BTC: inputs.
        weight_C1K: stored as `nn.Conv1d(groups=C)` stores it.
        positions_BT: of tokens in their documents; None: a row is one document.
        silu: through SiLU.
        dilation: tokens from tap to tap.
    """
    y_BTC = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
    if x_BTC.numel():
        x_BTC = side_by_side(x_BTC)
        fixed = _fixed(x_BTC, weight_C1K, positions_BT, silu, dilation)
        grid = _tiles(x_BTC)
        positions = x_BTC if positions_BT is None else positions_BT.contiguous()
        given = x_BTC, weight_C1K.contiguous(), positions, y_BTC, *x_BTC.shape, *x_BTC.stride()[:2]
        launch(_forward_kernel, grid, *given, **fixed)
    return y_BTC


@graph_operator("causal_conv_backward")
def backward(
    dy_BTC: Tensor,
    x_BTC: Tensor,
    weight_C1K: Tensor,
    positions_BT: Tensor | None,
    silu: bool,
    dilation: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of inputs and weight, each in its dtype.

    Args:
        dy_BTC: gradient of the result.
        x_BTC: inputs.
        weight_C1K: stored as `nn.Conv1d(groups=C)` stores it.
        positions_BT: of tokens in their documents; None: a row is one document.
        silu: through SiLU.
        dilation: tokens from tap to tap.
    """
    dx_BTC = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
    if not x_BTC.numel():
        return dx_BTC, torch.zeros_like(weight_C1K)
    x_BTC, dy_BTC = side_by_side(x_BTC), side_by_side(dy_BTC)
    programs, (C, _, K) = max(1, PROGRAMS // _tiles(x_BTC)[1]), weight_C1K.shape
    part_PCK = torch.empty(programs, C, K, dtype=torch.float32, device=x_BTC.device)
    launch(
        _backward_kernel,
        (programs, _tiles(x_BTC)[1]),
        *(dy_BTC, x_BTC, weight_C1K.contiguous()),
        x_BTC if positions_BT is None else positions_BT.contiguous(),
        *(dx_BTC, part_PCK, *x_BTC.shape, *x_BTC.stride()[:2], *dy_BTC.stride()[:2], programs),
        **_fixed(x_BTC, weight_C1K, positions_BT, silu, dilation),
    )
    return dx_BTC, part_PCK.sum(0, dtype=weight_C1K.dtype)[:, None]


def _tiles(x_BTC: Tensor) -> tuple[int, int]:
    """Return the number of tiles of all tokens, and of their channels."""
    B, T, C = x_BTC.shape
    return -(-B * T // TOKENS), -(-C // CHANNELS)


def _fixed(
    x_BTC: Tensor, weight_C1K: Tensor, positions_BT: Tensor | None, silu: bool, dilation: int
) -> dict[str, Any]:
    """Return the constants of a launch."""
    taps = weight_C1K.shape[-1]
    return {
        "K": taps,
        "TAPS": 1 << (taps - 1).bit_length(),
        "DILATION": dilation,
        "SILU": silu,
        "PACKED": positions_BT is not None,
        "TOKENS": TOKENS,
        "CHANNELS": CHANNELS,
        "num_warps": WARPS,
    }


@triton.jit
def _reach(position, token, tokens, T, PACKED: tl.constexpr):
    """Count the tokens in front of a token in its row and document; -1 where there is no token."""
    reach = tl.where(token < tokens, token % T, -1)
    if PACKED:
        there = tl.load(position + token, mask=token < tokens, other=-1)
        reach = tl.minimum(reach, there)
    return reach


@triton.jit
def _past(x, token, reach, lag: tl.constexpr, channel, T, C, row_stride, token_stride):
    """Load the inputs of `lag` tokens earlier in fp32, 0 where they are of another document."""
    start = (token // T).to(tl.int64) * row_stride + (token % T - lag).to(tl.int64) * token_stride
    seen = (reach >= lag)[:, None] & (channel < C)[None, :]
    return tl.load(x + start[:, None] + channel[None, :], mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _weight(weight, tap: tl.constexpr, channel, C, x, K: tl.constexpr):
    """Load the weights of a tap as FSDP2 gathers them, in fp32."""
    w = tl.load(weight + channel * K + tap, mask=channel < C, other=0.0)
    return w.to(x.dtype.element_ty).to(tl.float32)[None, :]


@triton.jit
def _sum_of_taps(
    x, weight, token, reach, channel, T, C,
    row_stride, token_stride,
    K: tl.constexpr, DILATION: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.static_range(K):
        past = _past(x, token, reach, j * DILATION, channel, T, C, row_stride, token_stride)
        total += past * _weight(weight, K - 1 - j, channel, C, x, K)
    return total


@triton.jit
def _forward_kernel(
    x, weight, position, y, B, T, C,
    row_stride, token_stride,
    K: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    reach = _reach(position, token, B * T, T, PACKED)
    total = _sum_of_taps(
        x,
        weight,
        token,
        reach,
        channel,
        T,
        C,
        row_stride,
        token_stride,
        K,
        DILATION,
        TOKENS,
        CHANNELS,
    )
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    inside = (token < B * T)[:, None] & (channel < C)[None, :]
    start = token.to(tl.int64) * C
    tl.store(y + start[:, None] + channel[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy, x, weight, position, dx, part, B, T, C,
    row_stride, token_stride, dy_row_stride, dy_token_stride,
    programs,
    K: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tap = tl.arange(0, TAPS)
    dweight = tl.zeros([CHANNELS, TAPS], tl.float32)
    for block in range(program, tl.cdiv(B * T, TOKENS), programs):
        token = block * TOKENS + tl.arange(0, TOKENS)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for j in tl.static_range(K):
            # The token that reads this one by tap j, if it is of the same row and document.
            later = token + j * DILATION
            later_reach = _reach(position, later, B * T, T, PACKED)
            later_reach = tl.where(later // T == token // T, later_reach, -1)
            reads = (later_reach >= j * DILATION)[:, None] & (channel < C)[None, :]
            start = (later // T).to(tl.int64) * dy_row_stride
            start += (later % T).to(tl.int64) * dy_token_stride
            g = tl.load(dy + start[:, None] + channel[None, :], mask=reads, other=0.0)
            g = g.to(tl.float32)
            if SILU:
                value = _sum_of_taps(
                    x,
                    weight,
                    later,
                    later_reach,
                    channel,
                    T,
                    C,
                    row_stride,
                    token_stride,
                    K,
                    DILATION,
                    TOKENS,
                    CHANNELS,
                )
                sigmoid = 1.0 / (1.0 + tl.exp(-value))
                slope = sigmoid * (1.0 + value * (1.0 - sigmoid))
                g = tl.where(reads, g * slope, 0.0)
            total += g * _weight(weight, K - 1 - j, channel, C, x, K)
            if j == 0:
                for i in tl.static_range(K):
                    lag = i * DILATION
                    past = _past(
                        x, token, later_reach, lag, channel, T, C, row_stride, token_stride
                    )
                    column = tl.sum(g * past, 0)[:, None]
                    dweight += tl.where((tap == K - 1 - i)[None, :], column, 0.0)
        inside = (token < B * T)[:, None] & (channel < C)[None, :]
        out = total.to(dx.dtype.element_ty)
        start = token.to(tl.int64) * C
        tl.store(dx + start[:, None] + channel[None, :], out, mask=inside)
    place = part + (tl.cast(program, tl.int64) * C + channel)[:, None] * K + tap[None, :]
    tl.store(place, dweight, mask=(channel < C)[:, None] & (tap < K)[None, :])
