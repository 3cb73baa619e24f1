"""Sums of what the programs of an M2RNN launch wrote apart, one launch for all of them.

Legend: B rows, U tokens of a launch, N heads, P blocks of rows of a state, G of an input's heads,
each shared by N / G heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.strides import launch

BLOCK = 1024  # numbers at a time
AT_ONCE = 16  # heads at a time
MOST = 5  # sums of a launch


def sum_parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write each result: the sum over blocks, and over heads that share an input.

    Args:
        pairs: parts `[P, B, U, N, W]` in fp32 and the result `[B, U, G, W]`, tokens of a longer
            row; one to five of them, each with its own sizes.
    """
    given: list[Any] = []
    fixed: dict[str, int] = {}
    for i in range(MOST):
        part, out = pairs[min(i, len(pairs) - 1)]
        assert part.is_contiguous() and out[0, 0].is_contiguous()
        given += [part, out, *out.stride()[:2], *out.shape[:2]]
        (P, _, _, N, W), G = part.shape, out.shape[2]
        fixed |= {f"P{i}": P, f"N{i}": N, f"G{i}": G, f"W{i}": W}
    widest = max(out.shape[-1] for _, out in pairs)
    fixed |= {"BLOCK": BLOCK, "PADDED": 1 << (widest - 1).bit_length(), "AT_ONCE": AT_ONCE}
    tokens = max(out[..., 0, 0].numel() for _, out in pairs)
    launch(_sum_kernel, (tokens, len(pairs)), *given, **fixed)


@triton.jit
def _sum(
    part, out, row_stride, token_stride, B, U,
    P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    to = out + token // U * row_stride + token % U * token_stride
    if G == N:
        for start in range(0, N * W, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for p in tl.static_range(P):
                place = part + (p * B * U + token) * (N * W) + column
                total += tl.load(place, mask=column < N * W, other=0.0)
            tl.store(to + column, total.to(out.dtype.element_ty), mask=column < N * W)
    else:
        column = tl.arange(0, PADDED)
        for g in range(G):
            total = tl.zeros([PADDED], tl.float32)
            for p in tl.static_range(P):
                place = part + (p * B * U + token) * (N * W) + g * (N // G * W)
                for first in range(0, N // G, AT_ONCE):
                    head = first + tl.arange(0, AT_ONCE)
                    some = (head < N // G)[:, None] & (column < W)[None, :]
                    offset = head[:, None] * W + column[None, :]
                    total += tl.sum(tl.load(place + offset, mask=some, other=0.0), 0)
            tl.store(to + g * W + column, total.to(out.dtype.element_ty), mask=column < W)


@triton.jit
def _sum_kernel(
    part0, out0, row_stride0, token_stride0, B0, U0,
    part1, out1, row_stride1, token_stride1, B1, U1,
    part2, out2, row_stride2, token_stride2, B2, U2,
    part3, out3, row_stride3, token_stride3, B3, U3,
    part4, out4, row_stride4, token_stride4, B4, U4,
    P0: tl.constexpr, N0: tl.constexpr, G0: tl.constexpr, W0: tl.constexpr,
    P1: tl.constexpr, N1: tl.constexpr, G1: tl.constexpr, W1: tl.constexpr,
    P2: tl.constexpr, N2: tl.constexpr, G2: tl.constexpr, W2: tl.constexpr,
    P3: tl.constexpr, N3: tl.constexpr, G3: tl.constexpr, W3: tl.constexpr,
    P4: tl.constexpr, N4: tl.constexpr, G4: tl.constexpr, W4: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    token, which = tl.program_id(0), tl.program_id(1)  # some sums have fewer tokens than others
    if (which == 0) & (token < B0 * U0):
        _sum(
            part0, out0, row_stride0, token_stride0, B0, U0,
            P0, N0, G0, W0, BLOCK, PADDED, AT_ONCE,
        )  # fmt: skip
    if (which == 1) & (token < B1 * U1):
        _sum(
            part1, out1, row_stride1, token_stride1, B1, U1,
            P1, N1, G1, W1, BLOCK, PADDED, AT_ONCE,
        )  # fmt: skip
    if (which == 2) & (token < B2 * U2):
        _sum(
            part2, out2, row_stride2, token_stride2, B2, U2,
            P2, N2, G2, W2, BLOCK, PADDED, AT_ONCE,
        )  # fmt: skip
    if (which == 3) & (token < B3 * U3):
        _sum(
            part3, out3, row_stride3, token_stride3, B3, U3,
            P3, N3, G3, W3, BLOCK, PADDED, AT_ONCE,
        )  # fmt: skip
    if (which == 4) & (token < B4 * U4):
        _sum(
            part4, out4, row_stride4, token_stride4, B4, U4,
            P4, N4, G4, W4, BLOCK, PADDED, AT_ONCE,
        )  # fmt: skip
