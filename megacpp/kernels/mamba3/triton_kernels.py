"""Triton kernels of the Mamba-3 scan of one rank: a program for each chunk and head.

The formulas are those of product.py, with scores q.k, weights w and decays of a chunk in registers:

    y  = W v + e^s (q S),             W[t, u] = e^(s(t) - s(u)) scale[u] (q[t].k[u]), u < t
    S' = e^s(C) S + (k w)^T v         w[u] = e^(s(C) - s(u)) scale[u]

Queries and keys are read as two halves, first and second partners of the rotated pairs, and turned
in registers; angles are in turns, of which whole ones don't matter. Operands of products are in the
dtype of v, everything else is fp32, the sum of angles over chunks fp64.

Legend: B rows, T tokens of a row, H heads, J chunks of a row, C tokens of a chunk, N state size, P
head dim, A rotated pairs. A program has all of N and P, in blocks that are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cos_sin(turns):
    """Return cosine and sine of 2 pi `turns`: polynomials up to an eighth of a turn."""
    quarter = tl.floor(4.0 * turns + 0.5)
    x = (turns - 0.25 * quarter) * 6.283185307179586
    y = x * x
    sin = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 - y * 1.9515295891e-4))
    cos = 4.166664568298827e-2 + y * (-1.388731625493765e-3 + y * 2.443315711809948e-5)
    cos = 1.0 - 0.5 * y + y * y * cos
    of_four = quarter.to(tl.int32) & 3
    odd = (of_four & 1) == 1
    cosine = tl.where(odd, sin, cos)
    sine = tl.where(odd, cos, sin)
    cosine = tl.where((of_four == 1) | (of_four == 2), -cosine, cosine)
    return cosine, tl.where(of_four >= 2, -sine, sine)


@triton.jit
def _documents(runs, j, size, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the documents of a chunk's tokens (-1: none), who entered it and who leaves it."""
    token = tl.arange(0, C)
    there = token < size
    run, enters, leaves = tl.where(there, 0, -1), there, there
    if PACKED:
        run = tl.load(runs + token, mask=there, other=-1)
        enters = run == tl.load(runs + tl.where(j > 0, -1, 0))
        leaves = run == tl.load(runs + size - 1)
    return run, enters, leaves


@triton.jit
def _cos_sin_of(
    turns, entering, enters, size, A: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return cosine and sine of the tokens' angles, `[C, N / 2]`."""
    token, pair = tl.arange(0, C), tl.arange(0, BLOCK_N)
    inside = (token < size)[:, None] & (pair < A)[None, :]
    angle = tl.load(turns + token[:, None] * A + pair[None, :], mask=inside, other=0.0)
    into = tl.load(entering + pair, mask=pair < A, other=0.0)
    return _cos_sin(angle + tl.where(enters[:, None], into[None, :], 0.0))


@triton.jit
def _rotated(
    x, bias, cos, sin, size,
    stride,
    N: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PARTNER: tl.constexpr,
):  # fmt: skip
    """Return both halves of queries or keys plus their bias, turned, in fp32, `[C, N / 2]`."""
    token, place = tl.arange(0, C), tl.arange(0, BLOCK_N) * STEP
    real = tl.arange(0, BLOCK_N) < N // 2
    inside = (token < size)[:, None] & real[None, :]
    start = x + token[:, None] * stride + place[None, :]
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    first += tl.load(bias + place, mask=real, other=0.0)[None, :]
    second = tl.load(start + PARTNER, mask=inside, other=0.0).to(tl.float32)
    second += tl.load(bias + place + PARTNER, mask=real, other=0.0)[None, :]
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def _rows(x, size, stride, P: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load numbers of tokens, `[C, P]`."""
    token, p = tl.arange(0, C), tl.arange(0, BLOCK_P)
    inside = (token < size)[:, None] & (p < P)[None, :]
    return tl.load(x + token[:, None] * stride + p[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(x, values, size, stride, P: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr):
    """Store numbers of tokens, `[C, P]`."""
    token, p = tl.arange(0, C), tl.arange(0, BLOCK_P)
    inside = (token < size)[:, None] & (p < P)[None, :]
    place = x + token[:, None] * stride + p[None, :]
    tl.store(place, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _half(states, N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return places of the first half of a state, `[N / 2, P]`, and which of them there are."""
    n = tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    return states + n[:, None] * P + p[None, :], (n < N // 2)[:, None] & (p < P)[None, :]


@triton.jit
def gated(dy, gate, GATED: tl.constexpr):
    """Return the gradient in front of the gate."""
    dy = dy.to(tl.float32)
    if GATED:
        gate = gate.to(tl.float32)
        dy = dy * gate * tl.sigmoid(gate)
    return dy


@triton.jit
def _scored(q1, q2, k1, k2, s, weight, run, C: tl.constexpr):
    """Return q.k, what of it later tokens see, and the diagonal, `[C, C]`."""
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
    t, u = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    before = (u < t) & (run[None, :] == run[:, None])
    decay = tl.exp(tl.where(before, s[:, None] - s[None, :], float("-inf")))
    return scores, decay * weight[None, :], t == u


@triton.jit
def _states_kernel(
    x, bias, v, z, sums, scale, turns, entering, runs, out, T, H, J,
    x_row, x_token, x_group, v_row, v_token, v_head, z_row, z_token, z_head,
    SHARED: tl.constexpr, BACKWARD: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, A: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, STEP: tl.constexpr, PARTNER: tl.constexpr,
):  # fmt: skip
    """Store what a chunk adds to a state, of keys and v; BACKWARD: to its gradient, of q and dy."""
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * H + h
    start = tl.cast(j, tl.int64) * C
    size = tl.minimum(C, T - j * C)
    _, enters, leaves = _documents(runs + b * T + start, j, size, C, PACKED)  # type: ignore
    turns += (head * T + start) * A
    cos, sin = _cos_sin_of(turns, entering + (head * J + j) * A, enters, size, A, C, BLOCK_N)
    x += b * x_row + start * x_token + (h // SHARED) * x_group
    first, second = _rotated(x, bias + h * N, cos, sin, size, x_token, N, C, BLOCK_N, STEP, PARTNER)
    token = tl.arange(0, C)
    there = token < size
    sums += head * T + start
    s = tl.load(sums + token, mask=there, other=0.0)
    values = _rows(v + b * v_row + start * v_token + h * v_head, size, v_token, P, C, BLOCK_P)
    if BACKWARD:
        factor = tl.exp(tl.where(enters, s, float("-inf")))
        gate = values
        if GATED:
            gate = _rows(z + b * z_row + start * z_token + h * z_head, size, z_token, P, C, BLOCK_P)
        values = gated(values, gate, GATED)
        kind = z.dtype.element_ty
    else:
        factor = tl.exp(tl.where(leaves, tl.load(sums + size - 1) - s, float("-inf")))
        factor *= tl.load(scale + head * T + start + token, mask=there, other=0.0)
        kind = v.dtype.element_ty
    values = values.to(kind)
    first = (first * factor[:, None]).to(kind)
    second = (second * factor[:, None]).to(kind)
    place, inside = _half(out + (head * J + j) * N * P, N, P, BLOCK_N, BLOCK_P)
    tl.store(place, tl.dot(tl.trans(first), values, input_precision="ieee"), mask=inside)
    place += N // 2 * P
    tl.store(place, tl.dot(tl.trans(second), values, input_precision="ieee"), mask=inside)


@triton.jit
def _outputs_kernel(
    q, k, q_bias, k_bias, v, z, D, sums, scale, gamma, turns, entering, runs, states, y, T, H, J,
    q_row, q_token, q_group, k_row, k_token, k_group, v_row, v_token, v_head, z_row, z_token,
    z_head,
    SHARED: tl.constexpr, GATED: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, A: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    STEP: tl.constexpr, PARTNER: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a chunk; y is contiguous."""
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * H + h
    kind = v.dtype.element_ty
    start = tl.cast(j, tl.int64) * C
    size = tl.minimum(C, T - j * C)
    here = (b * T + start) * H + h  # of all tokens and heads
    run, enters, _ = _documents(runs + b * T + start, j, size, C, PACKED)  # type: ignore
    turns += (head * T + start) * A
    cos, sin = _cos_sin_of(turns, entering + (head * J + j) * A, enters, size, A, C, BLOCK_N)
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
    weights = tl.where(diagonal, scores * own[:, None] + tl.load(D + h), scores * decay)
    place, inside = _half(states + (head * J + j) * N * P, N, P, BLOCK_N, BLOCK_P)
    out = tl.dot(q1, tl.load(place, mask=inside, other=0.0), input_precision="ieee")
    state2 = tl.load(place + N // 2 * P, mask=inside, other=0.0)
    out = tl.dot(q2, state2, out, input_precision="ieee")
    out *= tl.exp(tl.where(enters, s, float("-inf")))[:, None]
    v += b * v_row + start * v_token + h * v_head
    values = _rows(v, size, v_token, P, C, BLOCK_P)
    out = tl.dot(weights.to(kind), values, out, input_precision="ieee")
    if GATED:
        z += b * z_row + start * z_token + h * z_head
        gate = _rows(z, size, z_token, P, C, BLOCK_P)
        out = gated(out, gate, GATED)
    _store_rows(y + here * P, out, size, H * P, P, C, BLOCK_P)
