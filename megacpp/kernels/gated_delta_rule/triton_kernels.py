"""Triton kernels of the gated delta rule's forward: its formulas are those of chunks.py.

    T = (1 + strict_lower(diag(beta) K K^T * D))^-1     W = T diag(beta e) K     Y = T diag(beta) V
    U = Y - W S      S' = e_C S + (diag(D_C) K)^T U      O = diag(e) Q S + (Q K^T * D) U

T is found by substitution in blocks of 16 tokens, then by products of blocks: a series of powers
would cancel where keys repeat. Operands of products are in the dtype of v, everything else is fp32.

Legend: B rows, T tokens of a row, N value heads, J chunks of a row, C tokens of a chunk, K key, V
value. A program has all of a key's dims, and BLOCK_V of a value's at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp.kernels.mamba3.triton_kernels import _documents


@triton.jit
def _tile(x, size, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load `[ROWS, COLUMNS]`, with zeros beyond `size` rows and `width` columns."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < size)[:, None] & (column < width)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _put(x, values, size, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store `[ROWS, COLUMNS]`, but not beyond `size` rows and `width` columns."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < size)[:, None] & (column < width)[None, :]
    place = x + row[:, None] * stride + column[None, :]
    tl.store(place, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _one_over_length(x):
    """Return 1 / |x| of each row, in fp32."""
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _decays(s, run, C: tl.constexpr):
    """Return the decay from token u to token t, `[t, u]`: 0 unless u <= t in one document."""
    token = tl.arange(0, C)
    sees = (token[None, :] <= token[:, None]) & (run[None, :] == run[:, None])
    return tl.exp(tl.where(sees, s[:, None] - s[None, :], float("-inf")))


@triton.jit
def _joined(inverse, A, SIZE: tl.constexpr, C: tl.constexpr):
    """Return the inverse of blocks of 2 SIZE tokens, from that of blocks of SIZE."""
    block = tl.arange(0, C) // SIZE
    below = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
    between = tl.dot(inverse, tl.where(below, A, 0.0), input_precision="tf32x3")
    return inverse - tl.dot(between, inverse, input_precision="tf32x3")


@triton.jit
def _inverse(A, C: tl.constexpr):
    """Return (1 + A)^-1 of a strictly lower A, `[C, C]`."""
    BLOCKS: tl.constexpr = C // 16
    part, row = tl.arange(0, BLOCKS), tl.arange(0, 16)
    same = part[:, None, None, None] == part[None, None, :, None]
    own = tl.sum(tl.where(same, tl.reshape(A, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    one = row[None, :, None] == row[None, None, :]
    found = tl.zeros([BLOCKS, 16, 16], tl.float32) + tl.where(one, 1.0, 0.0)
    for i in range(15):
        column = tl.sum(tl.where((row == i)[None, None, :], own, 0.0), 2)
        ready = tl.sum(tl.where((row == i)[None, :, None], found, 0.0), 1)
        found -= column[:, :, None] * ready[:, None, :]
    out = tl.reshape(tl.where(same, found[:, :, None, :], 0.0), [C, C])
    if C > 16:
        out = _joined(out, A, 16, C)
    if C > 32:
        out = _joined(out, A, 32, C)
    return out


@triton.jit
def _solve_kernel(
    k, v, g, beta, runs, sums, lengths, solved, w, u, T, N, J,
    k_row, k_token, k_head, v_row, v_token, v_head,
    SHARED: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store sums of log decays, 1 / length of keys, W and Y of a chunk; KEEP: T, too."""
    j, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = v.dtype.element_ty
    start = tl.cast(j, tl.int64) * C
    size = tl.minimum(C, T - j * C)
    here = (b * N + n) * T + start  # of all heads and tokens
    run, enters, _ = _documents(runs + b * T + start, j, size, C, PACKED)  # type: ignore
    token = tl.arange(0, C)
    there = token < size
    gate = (b * T + start + token) * N + n
    log = tl.load(g + gate, mask=there, other=0.0).to(tl.float32)
    strength = tl.load(beta + gate, mask=there, other=0.0).to(tl.float32)
    before = (token[None, :] <= token[:, None]) & (run[None, :] == run[:, None])
    s = tl.sum(tl.where(before, log[None, :], 0.0), 1)
    tl.store(sums + here + token, s, mask=there)
    k += b * k_row + start * k_token + (n // SHARED) * k_head
    keys = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32)
    length = _one_over_length(keys)
    tl.store(lengths + here + token, length, mask=there)
    narrow = (keys * length[:, None]).to(kind)
    A = tl.dot(narrow, tl.trans(narrow), input_precision="tf32x3") * _decays(s, run, C)
    A = tl.where(token[None, :] < token[:, None], A * strength[:, None], 0.0)
    T_CC = _inverse(A, C).to(kind)
    if KEEP:
        _put(solved + here * C, T_CC, size, C, C, C, C)
    read = strength * tl.exp(tl.where(enters, s, float("-inf")))
    # Loaded again: kept through the inverse, they would spill.
    keys = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32) * length[:, None]
    keys = tl.dot(T_CC, (keys * read[:, None]).to(kind), input_precision="tf32x3")
    _put(w + here * K, keys, size, K, K, C, BLOCK_K)
    v += b * v_row + start * v_token + n * v_head
    for p in range(0, V, BLOCK_V):
        values = _tile(v + p, size, V - p, v_token, C, BLOCK_V).to(tl.float32)
        values = (values * strength[:, None]).to(kind)
        values = tl.dot(T_CC, values, input_precision="tf32x3")
        _put(u + here * V + p, values, size, V - p, V, C, BLOCK_V)


@triton.jit
def _states_kernel(
    k, w, u, sums, lengths, runs, first, states, last, T, N, J,
    k_row, k_token, k_head,
    SHARED: tl.constexpr, FIRST: tl.constexpr, STATES: tl.constexpr, PACKED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Turn Y into U, store the state in front of each chunk (STATES) and the last.

    A program has BLOCK_V columns of a head's state, chunk after chunk.
    """
    block, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = u.dtype.element_ty
    head, p, width = b * N + n, block * BLOCK_V, V - block * BLOCK_V
    token = tl.arange(0, C)
    k += b * k_row + (n // SHARED) * k_head
    w += head * T * K
    u += head * T * V + p
    sums += head * T
    lengths += head * T
    states += head * J * K * V + p
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if FIRST:
        state += _tile(first + head * K * V + p, K, width, V, BLOCK_K, BLOCK_V)
    for j in range(J):
        size = tl.minimum(C, T - j * C)
        there = token < size
        row = runs + b * T + j * C
        _, _, leaves = _documents(row, j, size, C, PACKED)  # type: ignore
        if STATES:
            _put(states, state, K, width, V, BLOCK_K, BLOCK_V)
            states += K * V
        read = _tile(w, size, K, K, C, BLOCK_K)
        own = _tile(u, size, width, V, C, BLOCK_V).to(tl.float32)
        own -= tl.dot(read, state.to(kind), input_precision="tf32x3")
        _put(u, own, size, width, V, C, BLOCK_V)
        total = tl.load(sums + size - 1)
        s = tl.load(sums + token, mask=there, other=0.0)
        until = tl.exp(tl.where(leaves, total - s, float("-inf")))
        until *= tl.load(lengths + token, mask=there, other=0.0)
        keys = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32)
        keys = (keys * until[:, None]).to(kind)
        keep = tl.exp(total)
        if PACKED:
            passes = tl.load(row + size - 1) == tl.load(row + tl.where(j > 0, -1, 0))
            keep = tl.where(passes, keep, 0.0)
        state = tl.dot(tl.trans(keys), own.to(kind), state * keep, input_precision="tf32x3")
        k += C * k_token
        w += C * K
        u += C * V
        sums += C
        lengths += C
    _put(last + head * K * V + p, state, K, width, V, BLOCK_K, BLOCK_V)


@triton.jit
def _outputs_kernel(
    q, k, u, sums, lengths, runs, states, o, T, N, J, scale,
    q_row, q_token, q_head, k_row, k_token, k_head,
    SHARED: tl.constexpr, PACKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a chunk; o is contiguous."""
    j, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = u.dtype.element_ty
    start = tl.cast(j, tl.int64) * C
    size = tl.minimum(C, T - j * C)
    head, here = b * N + n, (b * N + n) * T + start
    run, enters, _ = _documents(runs + b * T + start, j, size, C, PACKED)  # type: ignore
    token = tl.arange(0, C)
    there = token < size
    s = tl.load(sums + here + token, mask=there, other=0.0)
    q += b * q_row + start * q_token + (n // SHARED) * q_head
    queries = _tile(q, size, K, q_token, C, BLOCK_K).to(tl.float32)
    queries = (queries * (_one_over_length(queries) * scale)[:, None]).to(kind)
    k += b * k_row + start * k_token + (n // SHARED) * k_head
    length = tl.load(lengths + here + token, mask=there, other=0.0)
    keys = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32)
    keys = (keys * length[:, None]).to(kind)
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * _decays(s, run, C)
    scores = scores.to(kind)
    since = tl.exp(tl.where(enters, s, float("-inf")))[:, None]
    states += (head * J + j) * K * V
    o += ((b * T + start) * N + n) * V
    for p in range(0, V, BLOCK_V):
        state = _tile(states + p, K, V - p, V, BLOCK_K, BLOCK_V)
        out = tl.dot(queries, state, input_precision="tf32x3") * since
        written = _tile(u + here * V + p, size, V - p, V, C, BLOCK_V)
        out = tl.dot(scores, written, out, input_precision="tf32x3")
        _put(o + p, out, size, V - p, N * V, C, BLOCK_V)
