"""Triton kernels of the gradients of the Mamba-3 scan: a program for each chunk and head.

Weights and scores are computed again. Log decays are found without their matrix: a row of it sums
to q.dq, a column to k.dk, as in product.py. Everything written is contiguous.

Legend: as triton_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp.kernels.mamba3.triton_kernels import (
    _cos_sin_of,
    _documents,
    _half,
    _rotated,
    _rows,
    _scored,
    _store_rows,
    gated,
)


@triton.jit
def _queries_kernel(
    dy, q, k, q_bias, k_bias, v, z, D, sums, scale, gamma, turns, entering, runs, states, dq, dz,
    of_tokens, dturns, of_heads, B, T, H, J,
    dy_row, dy_token, dy_head, q_row, q_token, q_group, k_row, k_token, k_group, v_row, v_token,
    v_head, z_row, z_token, z_head,
    SHARED: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, A: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    STEP: tl.constexpr, PARTNER: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries and z, and of angles as far as queries turn.

    `of_tokens` gets those of sums as far as outputs decay, then of scale by `_keys_kernel`, and of
    gamma. `of_heads` gets a chunk's part of those of biases and D: of all heads' q_bias, `[H, N]`,
    k_bias by `_keys_kernel`, and D, `[H]`.
    """
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * H + h
    kind = v.dtype.element_ty
    start = tl.cast(j, tl.int64) * C
    size = tl.minimum(C, T - j * C)
    here = (b * T + start) * H + h  # of all tokens and heads
    run, enters, _ = _documents(runs + b * T + start, j, size, C, PACKED)  # type: ignore
    turns += (head * T + start) * A
    entering += (head * J + j) * A
    cos, sin = _cos_sin_of(turns, entering, enters, size, A, C, BLOCK_N)
    q += b * q_row + start * q_token + (h // SHARED) * q_group
    q1, q2 = _rotated(q, q_bias + h * N, cos, sin, size, q_token, N, C, BLOCK_N, STEP, PARTNER)
    k += b * k_row + start * k_token + (h // SHARED) * k_group
    k1, k2 = _rotated(k, k_bias + h * N, cos, sin, size, k_token, N, C, BLOCK_N, STEP, PARTNER)
    q1, q2, k1, k2 = q1.to(kind), q2.to(kind), k1.to(kind), k2.to(kind)
    token = tl.arange(0, C)
    there = token < size
    place = head * T + start + token
    s = tl.load(sums + place, mask=there, other=0.0)
    weight = tl.load(scale + place, mask=there, other=0.0)
    own = tl.load(gamma + place, mask=there, other=0.0)
    scores, decay, diagonal = _scored(q1, q2, k1, k2, s, weight, run, C)
    meets = tl.sum(tl.where(diagonal, scores, 0.0), 1)
    weights = tl.where(diagonal, scores * own[:, None] + tl.load(D + h), scores * decay).to(kind)
    dy += b * dy_row + start * dy_token + h * dy_head
    dout = _rows(dy, size, dy_token, P, C, BLOCK_P)
    gate = dout
    if GATED:
        z += b * z_row + start * z_token + h * z_head
        gate = _rows(z, size, z_token, P, C, BLOCK_P)
    dout = gated(dout, gate, GATED).to(kind)
    values = _rows(v + b * v_row + start * v_token + h * v_head, size, v_token, P, C, BLOCK_P)
    dweights = tl.dot(dout, tl.trans(values), input_precision="ieee")
    down = tl.sum(tl.where(diagonal, dweights, 0.0), 1)
    dscores = (dweights * decay).to(kind)
    of_heads += (b * J + j) * H * (2 * N + 1)
    # Not the sum of `down`: for sm_100 Triton 3.7 fails to compile it.
    tl.store(of_heads + 2 * N * H + h, tl.sum(tl.where(diagonal, dweights, 0.0)))
    place = of_tokens + head * T + start + token
    tl.store(place + 2 * tl.cast(B * H, tl.int64) * T, down * meets, mask=there)
    since = tl.exp(tl.where(enters, s, float("-inf")))[:, None]
    place, inside = _half(states + (head * J + j) * N * P, N, P, BLOCK_N, BLOCK_P)
    state1 = tl.load(place, mask=inside, other=0.0)
    state2 = tl.load(place + N // 2 * P, mask=inside, other=0.0)
    d1 = tl.dot(dout, tl.trans(state1), input_precision="ieee") * since
    d1 = tl.dot(dscores, k1, d1, input_precision="ieee")
    d2 = tl.dot(dout, tl.trans(state2), input_precision="ieee") * since
    d2 = tl.dot(dscores, k2, d2, input_precision="ieee")
    dsums = tl.sum(q1.to(tl.float32) * d1 + q2.to(tl.float32) * d2, 1)
    own = (down * own)[:, None]  # a token with itself, which no log decay touches
    d1 += own * k1.to(tl.float32)
    d2 += own * k2.to(tl.float32)
    turn = d2 * q1.to(tl.float32) - d1 * q2.to(tl.float32)  # moves (x1, x2) along (-x2, x1)
    pair = tl.arange(0, BLOCK_N)
    place = dturns + (head * T + start) * A + token[:, None] * A + pair[None, :]
    tl.store(place, turn, mask=there[:, None] & (pair < A)[None, :])
    place = of_tokens + head * T + start + token
    tl.store(place, dsums, mask=there)
    cos, sin = _cos_sin_of(turns, entering, enters, size, A, C, BLOCK_N)
    x, y = d1 * cos + d2 * sin, d2 * cos - d1 * sin
    place = of_heads + h * N
    _store_vectors(dq + here * N, place, x, y, size, H, N, C, BLOCK_N, STEP, PARTNER)

    if GATED:
        out = tl.dot(q1, state1, input_precision="ieee")
        out = tl.dot(q2, state2, out, input_precision="ieee") * since
        out = tl.dot(weights, values, out, input_precision="ieee")
        gate = _rows(z, size, z_token, P, C, BLOCK_P).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        out *= sigmoid * (1.0 + gate * (1.0 - sigmoid))
        out *= _rows(dy, size, dy_token, P, C, BLOCK_P).to(tl.float32)
        _store_rows(dz + here * P, out, size, H * P, P, C, BLOCK_P)


@triton.jit
def _keys_kernel(
    dy, q, k, q_bias, k_bias, v, z, D, sums, scale, gamma, turns, entering, runs, states, dstates,
    dk, dv, of_tokens, dturns, dentering, of_heads, B, T, H, J,
    dy_row, dy_token, dy_head, q_row, q_token, q_group, k_row, k_token, k_group, v_row, v_token,
    v_head, z_row, z_token, z_head,
    SHARED: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, A: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    STEP: tl.constexpr, PARTNER: tl.constexpr,
):  # fmt: skip
    """Store the gradients of keys and v, and of scale; add to those of sums and angles."""
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * H + h
    kind = v.dtype.element_ty
    start = tl.cast(j, tl.int64) * C
    size = tl.minimum(C, T - j * C)
    here = (b * T + start) * H + h  # of all tokens and heads
    run, enters, leaves = _documents(runs + b * T + start, j, size, C, PACKED)  # type: ignore
    turns += (head * T + start) * A
    entering += (head * J + j) * A
    cos, sin = _cos_sin_of(turns, entering, enters, size, A, C, BLOCK_N)
    q += b * q_row + start * q_token + (h // SHARED) * q_group
    q1, q2 = _rotated(q, q_bias + h * N, cos, sin, size, q_token, N, C, BLOCK_N, STEP, PARTNER)
    k += b * k_row + start * k_token + (h // SHARED) * k_group
    k1, k2 = _rotated(k, k_bias + h * N, cos, sin, size, k_token, N, C, BLOCK_N, STEP, PARTNER)
    q1, q2, k1, k2 = q1.to(kind), q2.to(kind), k1.to(kind), k2.to(kind)
    token = tl.arange(0, C)
    there = token < size
    place = head * T + start + token
    s = tl.load(sums + place, mask=there, other=0.0)
    weight = tl.load(scale + place, mask=there, other=0.0)
    own = tl.load(gamma + place, mask=there, other=0.0)
    scores, decay, diagonal = _scored(q1, q2, k1, k2, s, weight, run, C)
    weights = tl.where(diagonal, scores * own[:, None] + tl.load(D + h), scores * decay).to(kind)
    dy += b * dy_row + start * dy_token + h * dy_head
    dout = _rows(dy, size, dy_token, P, C, BLOCK_P)
    gate = dout
    if GATED:
        z += b * z_row + start * z_token + h * z_head
        gate = _rows(z, size, z_token, P, C, BLOCK_P)
    dout = gated(dout, gate, GATED).to(kind)
    values = _rows(v + b * v_row + start * v_token + h * v_head, size, v_token, P, C, BLOCK_P)
    dweights = tl.dot(dout, tl.trans(values), input_precision="ieee")
    down = tl.sum(tl.where(diagonal, dweights, 0.0), 1)
    dscores = (dweights * decay).to(kind)
    each = tl.cast(B * H, tl.int64) * T
    total = tl.load(sums + head * T + start + size - 1)
    until = tl.exp(tl.where(leaves, total - s, float("-inf")))
    until = (until * weight)[:, None]
    place, inside = _half(dstates + (head * J + j) * N * P, N, P, BLOCK_N, BLOCK_P)
    dstate1 = tl.load(place, mask=inside, other=0.0)
    dstate2 = tl.load(place + N // 2 * P, mask=inside, other=0.0)
    out = tl.dot(k1, dstate1, input_precision="ieee")
    out = tl.dot(k2, dstate2, out, input_precision="ieee") * until
    out = tl.dot(tl.trans(weights), dout, out, input_precision="ieee")
    _store_rows(dv + here * P, out, size, H * P, P, C, BLOCK_P)

    # Of the log decay of the whole chunk, to which the state behind it is proportional.
    place, inside = _half(states + (head * J + j) * N * P, N, P, BLOCK_N, BLOCK_P)
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    passed = tl.sum(state * dstate1.to(tl.float32), 1)
    state = tl.load(place + N // 2 * P, mask=inside, other=0.0).to(tl.float32)
    passed += tl.sum(state * dstate2.to(tl.float32), 1)
    ends = tl.sum(passed, 0) * tl.exp(total)
    if PACKED:
        row = runs + b * T + j * C
        passes = tl.load(row + size - 1) == tl.load(row + tl.where(j > 0, -1, 0))
        ends = tl.where(passes, ends, 0.0)
    d1 = tl.dot(values, tl.trans(dstate1), input_precision="ieee") * until
    d2 = tl.dot(values, tl.trans(dstate2), input_precision="ieee") * until
    column = tl.sum(k1.to(tl.float32) * d1 + k2.to(tl.float32) * d2, 1)
    at_end = (token == size - 1)[:, None]
    ends = tl.where(token == size - 1, ends, 0.0)
    ends += tl.sum(tl.where(at_end, column[None, :], 0.0), 1)
    d1 = tl.dot(tl.trans(dscores), q1, d1, input_precision="ieee")
    d2 = tl.dot(tl.trans(dscores), q2, d2, input_precision="ieee")
    column = tl.sum(k1.to(tl.float32) * d1 + k2.to(tl.float32) * d2, 1)
    own = (down * own)[:, None]
    d1 += own * q1.to(tl.float32)
    d2 += own * q2.to(tl.float32)
    turn = d2 * k1.to(tl.float32) - d1 * k2.to(tl.float32)
    cos, sin = _cos_sin_of(turns, entering, enters, size, A, C, BLOCK_N)
    x, y = d1 * cos + d2 * sin, d2 * cos - d1 * sin
    place = of_heads + (b * J + j) * H * (2 * N + 1) + (H + h) * N
    _store_vectors(dk + here * N, place, x, y, size, H, N, C, BLOCK_N, STEP, PARTNER)

    place = of_tokens + head * T + start + token
    dsums = tl.load(place, mask=there, other=0.0) - column
    tl.store(place, dsums + ends, mask=there)
    tl.store(place + each, column / tl.maximum(weight, 1e-35), mask=there)
    pair = tl.arange(0, BLOCK_N)
    place = dturns + (head * T + start) * A + token[:, None] * A + pair[None, :]
    inside = there[:, None] & (pair < A)[None, :]
    turn += tl.load(place, mask=inside, other=0.0)
    tl.store(place, turn, mask=inside)
    turn = tl.sum(tl.where(enters[:, None], turn, 0.0), 0)
    tl.store(dentering + (head * J + j) * A + pair, turn, mask=pair < A)


@triton.jit
def _store_vectors(
    dx, dbias, first, second, size, H,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PARTNER: tl.constexpr,
):  # fmt: skip
    token, place = tl.arange(0, C), tl.arange(0, BLOCK_N) * STEP
    real = tl.arange(0, BLOCK_N) < N // 2
    inside = (token < size)[:, None] & real[None, :]
    start = dx + token[:, None] * (H * N) + place[None, :]
    tl.store(start, first.to(dx.dtype.element_ty), mask=inside)
    tl.store(start + PARTNER, second.to(dx.dtype.element_ty), mask=inside)
    tl.store(dbias + place, tl.sum(first, 0), mask=real)
    tl.store(dbias + place + PARTNER, tl.sum(second, 0), mask=real)
