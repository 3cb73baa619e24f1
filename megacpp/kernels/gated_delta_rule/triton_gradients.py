"""Triton kernels of the gated delta rule's gradients: two for each chunk, one chunk after chunk.

With X = diag(beta) V and dX = T^T dU, the gradient of A = T^-1 is -dX U^T: neither Y nor W is read.
Log decays get theirs from sums over rows and columns of weights times their gradients.

Legend: as triton_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megacpp.kernels.gated_delta_rule.triton_kernels import _decays, _one_over_length, _put, _tile
from megacpp.kernels.mamba3.triton_kernels import _documents


@triton.jit
def _of_length(unit, d, length):
    """Return the gradient of x, from that of x / |x|."""
    return length[:, None] * (d - unit * tl.sum(unit * d, 1)[:, None])


@triton.jit
def _queries_kernel(
    do, q, k, u, sums, lengths, runs, states, dq, du, q_lengths, dsums, T, N, J, scale,
    do_row, do_token, do_head, q_row, q_token, q_head, k_row, k_token, k_head,
    SHARED: tl.constexpr, PACKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries, and of U and of sums of log decays as far as outputs go.

    `q_lengths` gets 1 / length of queries.
    """
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
    q_length = _one_over_length(queries)
    tl.store(q_lengths + here + token, q_length, mask=there)
    queries = (queries * (q_length * scale)[:, None]).to(kind)
    k += b * k_row + start * k_token + (n // SHARED) * k_head
    length = tl.load(lengths + here + token, mask=there, other=0.0)
    keys = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32)
    keys = (keys * length[:, None]).to(kind)
    decay = _decays(s, run, C)
    scores = (tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * decay).to(kind)
    states += (head * J + j) * K * V
    do += b * do_row + start * do_token + n * do_head
    dscores = tl.zeros([C, C], tl.float32)
    d = tl.zeros([C, BLOCK_K], tl.float32)
    for p in range(0, V, BLOCK_V):
        dout = _tile(do + p, size, V - p, do_token, C, BLOCK_V).to(kind)
        written = _tile(u + here * V + p, size, V - p, V, C, BLOCK_V)
        dscores = tl.dot(dout, tl.trans(written), dscores, input_precision="tf32x3")
        state = _tile(states + p, K, V - p, V, BLOCK_K, BLOCK_V)
        d = tl.dot(dout, tl.trans(state), d, input_precision="tf32x3")
        out = tl.dot(tl.trans(scores), dout, input_precision="tf32x3")
        _put(du + here * V + p, out, size, V - p, V, C, BLOCK_V)
    d *= tl.exp(tl.where(enters, s, float("-inf")))[:, None]
    d = tl.dot((dscores * decay).to(kind), keys, d, input_precision="tf32x3")
    tl.store(dsums + here + token, tl.sum(queries.to(tl.float32) * d, 1), mask=there)
    unit = _tile(q, size, K, q_token, C, BLOCK_K).to(tl.float32) * q_length[:, None]
    d = _of_length(unit, d * scale, q_length)
    _put(dq + ((b * T + start) * N + n) * K, d, size, K, N * K, C, BLOCK_K)


@triton.jit
def _dstates_kernel(
    do, q, k, w, sums, lengths, q_lengths, runs, dlast, du, dstates, dfirst, T, N, J, scale,
    do_row, do_token, do_head, q_row, q_token, q_head, k_row, k_token, k_head,
    SHARED: tl.constexpr, QUERIES: tl.constexpr, LAST: tl.constexpr, FIRST: tl.constexpr,
    PACKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the state behind each chunk, of U, and of a row's first state (FIRST).

    `du` has what outputs add (QUERIES), or memory for it. A program has BLOCK_V columns of a head's
    state, from the last chunk to the first.
    """
    block, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = du.dtype.element_ty
    head, p, width = b * N + n, block * BLOCK_V, V - block * BLOCK_V
    token, behind = tl.arange(0, C), tl.cast(J - 1, tl.int64)
    k += b * k_row + (n // SHARED) * k_head + behind * C * k_token
    q += b * q_row + (n // SHARED) * q_head + behind * C * q_token
    do += b * do_row + n * do_head + behind * C * do_token + p
    here = head * T + behind * C
    w += here * K
    du += here * V + p
    sums += here
    lengths += here
    q_lengths += here
    dstates += (head * J + behind) * K * V + p
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if LAST:
        state += _tile(dlast + head * K * V + p, K, width, V, BLOCK_K, BLOCK_V)
    for i in range(J):
        j = J - 1 - i
        size = tl.minimum(C, T - j * C)
        there = token < size
        row = runs + b * T + j * C
        _, enters, leaves = _documents(row, j, size, C, PACKED)  # type: ignore
        _put(dstates, state, K, width, V, BLOCK_K, BLOCK_V)
        total = tl.load(sums + size - 1)
        s = tl.load(sums + token, mask=there, other=0.0)
        until = tl.exp(tl.where(leaves, total - s, float("-inf")))
        until *= tl.load(lengths + token, mask=there, other=0.0)
        keys = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32)
        keys = (keys * until[:, None]).to(kind)
        d = tl.dot(keys, state.to(kind), input_precision="tf32x3")
        if QUERIES:
            d += _tile(du, size, width, V, C, BLOCK_V).to(tl.float32)
        _put(du, d, size, width, V, C, BLOCK_V)
        keep = tl.exp(total)
        if PACKED:
            passes = tl.load(row + size - 1) == tl.load(row + tl.where(j > 0, -1, 0))
            keep = tl.where(passes, keep, 0.0)
        state *= keep
        read = _tile(w, size, K, K, C, BLOCK_K)
        state = tl.dot(tl.trans(read), -d.to(kind), state, input_precision="tf32x3")
        if QUERIES:
            since = tl.exp(tl.where(enters, s, float("-inf"))) * scale
            since *= tl.load(q_lengths + token, mask=there, other=0.0)
            queries = _tile(q, size, K, q_token, C, BLOCK_K).to(tl.float32)
            queries = (queries * since[:, None]).to(kind)
            dout = _tile(do, size, width, do_token, C, BLOCK_V).to(kind)
            state = tl.dot(tl.trans(queries), dout, state, input_precision="tf32x3")
        k -= C * k_token
        q -= C * q_token
        do -= C * do_token
        w -= C * K
        du -= C * V
        sums -= C
        lengths -= C
        q_lengths -= C
        dstates -= K * V
    if FIRST:
        _put(dfirst + head * K * V + p, state, K, width, V, BLOCK_K, BLOCK_V)


@triton.jit
def _keys_kernel(
    do, q, k, v, beta, sums, lengths, q_lengths, runs, solved, u, du, states, dstates, dsums, dk,
    dv, dg, dbeta, T, N, J, scale,
    do_row, do_token, do_head, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token,
    v_head,
    SHARED: tl.constexpr, QUERIES: tl.constexpr, PACKED: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the gradients of keys, values, log decays and write strengths."""
    j, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = u.dtype.element_ty
    start = tl.cast(j, tl.int64) * C
    size = tl.minimum(C, T - j * C)
    head, here = b * N + n, (b * N + n) * T + start
    run, enters, leaves = _documents(runs + b * T + start, j, size, C, PACKED)  # type: ignore
    token = tl.arange(0, C)
    there = token < size
    gate = (b * T + start + token) * N + n
    strength = tl.load(beta + gate, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sums + here + token, mask=there, other=0.0)
    decay = _decays(s, run, C)
    k += b * k_row + start * k_token + (n // SHARED) * k_head
    length = tl.load(lengths + here + token, mask=there, other=0.0)
    keys = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32)
    keys = (keys * length[:, None]).to(kind)
    T_CC = _tile(solved + here * C, size, C, C, C, C)

    v += b * v_row + start * v_token + n * v_head
    dv += ((b * T + start) * N + n) * V
    dA = tl.zeros([C, C], tl.float32)
    dstrength = tl.zeros([C], tl.float32)
    for p in range(0, V, BLOCK_V):
        dwritten = _tile(du + here * V + p, size, V - p, V, C, BLOCK_V)
        dx = tl.dot(tl.trans(T_CC), dwritten, input_precision="tf32x3")
        values = _tile(v + p, size, V - p, v_token, C, BLOCK_V).to(tl.float32)
        dstrength += tl.sum(dx * values, 1)
        _put(dv + p, dx * strength[:, None], size, V - p, N * V, C, BLOCK_V)
        written = _tile(u + here * V + p, size, V - p, V, C, BLOCK_V)
        dA = tl.dot(dx.to(kind), tl.trans(written), dA, input_precision="tf32x3")
    dA = tl.where(token[None, :] < token[:, None], -dA * decay, 0.0)
    pairs = dA * tl.dot(keys, tl.trans(keys), input_precision="tf32x3")
    dstrength += tl.sum(pairs, 1)
    pairs *= strength[:, None]
    of_sums = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    erased = (dA * strength[:, None]).to(kind)
    d = tl.dot(erased, keys, input_precision="tf32x3")
    d = tl.dot(tl.trans(erased), keys, d, input_precision="tf32x3")

    if QUERIES:
        do += b * do_row + start * do_token + n * do_head
        dscores = tl.zeros([C, C], tl.float32)
        for p in range(0, V, BLOCK_V):
            dout = _tile(do + p, size, V - p, do_token, C, BLOCK_V).to(kind)
            written = _tile(u + here * V + p, size, V - p, V, C, BLOCK_V)
            dscores = tl.dot(dout, tl.trans(written), dscores, input_precision="tf32x3")
        q += b * q_row + start * q_token + (n // SHARED) * q_head
        q_length = tl.load(q_lengths + here + token, mask=there, other=0.0) * scale
        queries = _tile(q, size, K, q_token, C, BLOCK_K).to(tl.float32)
        queries = (queries * q_length[:, None]).to(kind)
        dscores = tl.trans((dscores * decay).to(kind))
        of_scores = tl.dot(dscores, queries, input_precision="tf32x3")
        of_sums += tl.load(dsums + here + token, mask=there, other=0.0)
        of_sums -= tl.sum(keys.to(tl.float32) * of_scores, 1)  # rounded, as in the rows' sums
        d += of_scores

    of_chunk = (head * J + j) * K * V
    of_read = tl.zeros([C, BLOCK_K], tl.float32)
    for p in range(0, V, BLOCK_V):
        dwritten = _tile(du + here * V + p, size, V - p, V, C, BLOCK_V)
        state = _tile(states + of_chunk + p, K, V - p, V, BLOCK_K, BLOCK_V)
        of_read = tl.dot(dwritten, tl.trans(state), of_read, input_precision="tf32x3")
    of_read = -tl.dot(tl.trans(T_CC), of_read.to(kind), input_precision="tf32x3")
    of_read *= tl.exp(tl.where(enters, s, float("-inf")))[:, None]
    column = tl.sum(keys.to(tl.float32) * of_read, 1)
    dstrength += column
    of_sums += column * strength
    d += of_read * strength[:, None]

    of_kept = tl.zeros([C, BLOCK_K], tl.float32)
    passed = tl.zeros([BLOCK_K], tl.float32)
    for p in range(0, V, BLOCK_V):
        written = _tile(u + here * V + p, size, V - p, V, C, BLOCK_V)
        state = _tile(states + of_chunk + p, K, V - p, V, BLOCK_K, BLOCK_V)
        dstate = _tile(dstates + of_chunk + p, K, V - p, V, BLOCK_K, BLOCK_V)
        of_kept = tl.dot(written, tl.trans(dstate), of_kept, input_precision="tf32x3")
        passed += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    total = tl.load(sums + here + size - 1)
    of_kept *= tl.exp(tl.where(leaves, total - s, float("-inf")))[:, None]
    column = tl.sum(keys.to(tl.float32) * of_kept, 1)
    d += of_kept
    # The log decay of the whole chunk: the state behind it is proportional to its exp.
    ends = tl.sum(passed, 0) * tl.exp(total)
    if PACKED:
        row = runs + b * T + j * C
        passes = tl.load(row + size - 1) == tl.load(row + tl.where(j > 0, -1, 0))
        ends = tl.where(passes, ends, 0.0)
    at_end = token == size - 1
    column_sum = tl.sum(tl.where(at_end[:, None], column[None, :], 0.0), 1)
    of_sums += tl.where(at_end, ends, 0.0) + column_sum - column

    unit = _tile(k, size, K, k_token, C, BLOCK_K).to(tl.float32) * length[:, None]
    d = _of_length(unit, d, length)
    _put(dk + ((b * T + start) * N + n) * K, d, size, K, N * K, C, BLOCK_K)
    tl.store(dbeta + gate, dstrength, mask=there)
    later = (token[None, :] >= token[:, None]) & (run[None, :] == run[:, None])
    tl.store(dg + gate, tl.sum(tl.where(later, of_sums[None, :], 0.0), 1), mask=there)
