"""Triton kernels of the M2RNN recurrence: tokens forward, and tokens backward with all gradients.

    run       a state stays in registers, tokens in order
    backward  chunks from the last to the first: their states again into memory, then from their
              last token to the first, with dL/dh and the gradient of W in registers

W mixes the columns of a state and never its rows, so a program is one warp with 16 rows of one
head's state: it waits for no other. What sums over all rows (outputs, gradients of v and f)
is written for each block of rows, and added up outside. All numbers inside are fp32, whatever the
inputs are; products are IEEE fp32, not TF32. A state is padded to powers of two of at least 16
(`tl.dot`); its padding is zero and stays so.

Imported inside functions only: Triton is optional.

Legend: B rows of the batch, T tokens of one, N heads, K key, V value, C tokens of a chunk, X chunks
of T, U tokens of a launch, P blocks of 16 rows of a state. Strides are `_b` of rows, `_t` of tokens
and `_n` of heads, in numbers; a vector and a state are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

CARRIED = tl.constexpr(1)
TOTAL = tl.constexpr(2)


@triton.jit
def tanh(x):
    """Compute tanh, at most 4 ulp off, near zero too, where 1 - 2 / (exp(2x) + 1) loses its digits.

    Below 0.6 x + x^3 P(x^2), P of degree 4 within 3e-9 of the largest x (least squares in fp64,
    reweighted until the error is level); above it exp(-2|x|), which can't overflow.
    """
    s = x * x
    p = -5.905868e-3 * s + 2.0805384e-2
    p = p * s - 5.3786683e-2
    p = p * s + 1.3331958e-1
    p = p * s - 3.3333299e-1
    small = x + x * s * p
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.6, small, tl.where(x < 0, -large, large))


@triton.jit
def clip(x, bound):
    """Clip into [-bound, bound]; NaN stays NaN, as in torch.clamp."""
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def begin(
    h_KV, start, index, n, N, initial_ptr, tile, inside,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return the state that a token sees: at the start of a sequence that of `initial_ptr`.

    Args:
        h_KV: state behind the token before.
        start: is this token a sequence's first?
        index: of its sequence.
        n, N: head and heads.
        initial_ptr: `[S, N, K, V]` of S sequences.
        tile: places of a state.
        inside: which of them exist.
        PACKED, INITIAL: rows restart; initial states are given.
        K, V: sizes.
    """
    if PACKED:
        # where, not a product: a NaN of another document times zero would still be a NaN.
        begun_KV = tl.zeros_like(h_KV)
        if INITIAL:
            entered = (index * N + n) * (K * V) + tile
            begun_KV = tl.load(initial_ptr + entered, mask=inside & (start != 0), other=0.0)
        h_KV = tl.where(start != 0, begun_KV, h_KV)
    return h_KV


@triton.jit(do_not_specialize=["first", "count"])
def run_kernel(
    q_ptr, k_ptr, v_ptr, f_ptr, w_ptr, h_ptr, starts_ptr, index_ptr, initial_ptr,
    y_ptr, fronts_ptr, final_ptr, before_ptr, z_ptr,
    first, count, B, N, chunk_size,
    q_b, q_t, q_n, k_b, k_t, k_n, v_b, v_t, v_n, f_b, f_t, f_n, T, y_p, y_b,
    Q_SHARED: tl.constexpr, K_SHARED: tl.constexpr, V_SHARED: tl.constexpr,
    F_SHARED: tl.constexpr, W_SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    FRONTS: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr, FROM_ZERO: tl.constexpr,
):  # fmt: skip
    """Run tokens `first` to `first + count` of each row, from the states `h` `[B, N, K, V]`.

    The states behind them replace `h`. Writes outputs of blocks of rows `[P, B, U, N, V]` and, as
    asked: states at chunk starts `[X, B, N, K, V]`; final states of sequences; per token the state
    in front of it, after a restart, and tanh, `[N, T, B, K, V]`.

    Args:
        q_ptr, k_ptr, v_ptr, f_ptr, w_ptr, starts_ptr, index_ptr, initial_ptr: read.
        h_ptr: read and written.
        y_ptr, fronts_ptr, final_ptr, before_ptr, z_ptr: written.
        first, count, chunk_size: tokens; `first` is a chunk's.
        B, N, T, K, V: sizes.
        q_b, q_t, q_n, ...: strides of rows, tokens and heads; `y_p` of blocks.
        Q_SHARED, ...: neighbouring heads that share one of an input.
        BLOCK_K, BLOCK_V: rows of a program, padded V.
        PACKED, INITIAL: rows restart; initial states are given.
        FRONTS, FINAL, KEEP: what is written.
        FROM_ZERO: states are 0 at first, and `h` isn't read.
    """
    p, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ks, vs = p * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_in, v_in = ks < K, vs < V
    tile = ks[:, None] * V + vs[None, :]
    inside = k_in[:, None] & v_in[None, :]
    state = (b * N + n) * (K * V) + tile
    w_VV = tl.load(
        w_ptr + (n // W_SHARED) * (V * V) + vs[:, None] * V + vs[None, :],
        mask=v_in[:, None] & v_in[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    h_KV = tl.load(h_ptr + state, mask=inside & (not FROM_ZERO), other=0.0)
    here = tl.cast(first, tl.int64)
    q_ptr += b * q_b + here * q_t + (n // Q_SHARED) * q_n + ks
    k_ptr += b * k_b + here * k_t + (n // K_SHARED) * k_n + ks
    v_ptr += b * v_b + here * v_t + (n // V_SHARED) * v_n + vs
    f_ptr += b * f_b + here * f_t + (n // F_SHARED) * f_n
    y_ptr += p * tl.cast(y_p, tl.int64) + b * y_b + n * V + vs
    starts_ptr += b * T + here
    index_ptr += b * T + here
    kept = ((tl.cast(n, tl.int64) * T + here) * B + b) * (K * V) + tile
    before_ptr += kept
    z_ptr += kept
    fronts_ptr += here // chunk_size * B * N * (K * V) + state
    # Each token's inputs are on their way while the one before it is computed.
    q_K = tl.load(q_ptr, mask=k_in, other=0.0).to(tl.float32)
    k_K = tl.load(k_ptr, mask=k_in, other=0.0).to(tl.float32)
    v_V = tl.load(v_ptr, mask=v_in, other=0.0).to(tl.float32)
    f = tl.load(f_ptr).to(tl.float32)
    start = tl.load(starts_ptr, mask=PACKED, other=0).to(tl.int32)
    index = tl.load(index_ptr, mask=PACKED, other=0)
    for c in range(count):
        more = c + 1 < count
        q_ptr += q_t
        k_ptr += k_t
        v_ptr += v_t
        f_ptr += f_t
        next_q_K = tl.load(q_ptr, mask=k_in & more, other=0.0).to(tl.float32)
        next_k_K = tl.load(k_ptr, mask=k_in & more, other=0.0).to(tl.float32)
        next_v_V = tl.load(v_ptr, mask=v_in & more, other=0.0).to(tl.float32)
        next_f = tl.load(f_ptr, mask=more, other=0.0).to(tl.float32)
        behind = here + c + 1 < T  # the row goes on, be it in the next launch
        next_start = tl.load(starts_ptr + c + 1, mask=behind & PACKED, other=1).to(tl.int32)
        next_index = tl.load(index_ptr + c + 1, mask=behind & PACKED, other=0)
        if FRONTS:  # noqa: SIM102 - known when compiled, the other is not
            if c % chunk_size == 0:
                tl.store(fronts_ptr, h_KV, mask=inside)
                fronts_ptr += tl.cast(N, tl.int64) * B * (K * V)
        h_KV = begin(h_KV, start, index, n, N, initial_ptr, tile, inside, PACKED, INITIAL, K, V)
        z_KV = tanh(tl.dot(h_KV, w_VV, acc=k_K[:, None] * v_V[None, :], input_precision="ieee"))
        if KEEP:
            tl.store(before_ptr, h_KV, mask=inside)
            tl.store(z_ptr, z_KV, mask=inside)
            before_ptr += B * (K * V)
            z_ptr += B * (K * V)
        h_KV = z_KV + f * (h_KV - z_KV)
        y_V = tl.sum(q_K[:, None] * h_KV, 0)
        tl.store(y_ptr, y_V.to(y_ptr.dtype.element_ty), mask=v_in)
        y_ptr += N * V
        if FINAL:
            ended = (index * N + n) * (K * V) + tile
            tl.store(final_ptr + ended, h_KV, mask=inside & (next_start != 0))
        q_K, k_K, v_V, f, start, index = (
            next_q_K,
            next_k_K,
            next_v_V,
            next_f,
            next_start,
            next_index,
        )
    tl.store(h_ptr + state, h_KV, mask=inside)


@triton.jit(do_not_specialize=["first", "count"])
def backward_kernel(
    q_ptr, k_ptr, v_ptr, f_ptr, w_ptr, dy_ptr, starts_ptr, index_ptr, initial_ptr,
    fronts_ptr, before_ptr, z_ptr, dh_ptr, dinitial_ptr, dfinal_ptr,
    dq_ptr, dk_ptr, dv_ptr, df_ptr, dw_ptr, bound,
    first, count, B, N, chunk_size, kept_n, U,
    q_b, q_t, q_n, k_b, k_t, k_n, v_b, v_t, v_n, f_b, f_t, f_n, T,
    Q_SHARED: tl.constexpr, K_SHARED: tl.constexpr, V_SHARED: tl.constexpr,
    F_SHARED: tl.constexpr, W_SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    AGAIN: tl.constexpr, DINITIAL: tl.constexpr, DFINAL: tl.constexpr, CLIP: tl.constexpr,
    DH_FROM_ZERO: tl.constexpr, DW_FROM_ZERO: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of tokens `first + count` to `first`, backwards.

    `dh` `[B, N, K, V]` is the gradient that comes from tokens behind these and becomes the one that
    goes to tokens in front of them. With x the argument of tanh, dL/dx = (1 - f) (1 - tanh^2) dL/dh
    and dL/dh_{t-1} = f dL/dh_t + dL/dx_t W^T + q_{t-1} dy_{t-1}^T. Writes for each head dq and dk
    `[B, U, N, K]`, for each block of rows dv `[P, B, U, N, V]` and df `[P, B, U, N]`, and adds to
    dw `[P, B, N, V, V]`.

    Args:
        q_ptr, k_ptr, v_ptr, f_ptr, w_ptr, dy_ptr, starts_ptr, index_ptr, initial_ptr: read.
        fronts_ptr: states at chunk starts, `[X, B, N, K, V]`; read with `AGAIN`.
        before_ptr, z_ptr: states in front of tokens and tanh, `[N, kept_n, B, K, V]`; of one chunk
            and written here with `AGAIN`, otherwise of all tokens and read.
        dh_ptr: read and written.
        dfinal_ptr: gradients of final states of sequences; read.
        dinitial_ptr, dq_ptr, dk_ptr, dv_ptr, df_ptr: written.
        dw_ptr: read and written.
        bound: of the clip.
        first, count, chunk_size: tokens; `first` is a chunk's.
        B, N, T, K, V: sizes.
        kept_n: tokens that `before` and `z` have room for.
        U: tokens that dq, dk, dv and df have room for.
        q_b, q_t, q_n, ...: strides of rows, tokens and heads.
        Q_SHARED, ...: neighbouring heads that share one of an input.
        BLOCK_K, BLOCK_V: rows of a program, padded V.
        PACKED, INITIAL, DINITIAL, DFINAL: rows restart; initial states, and gradients of initial
            and final states.
        AGAIN: compute the states of a chunk again.
        CLIP: which gradient is clipped; 0: none.
        DH_FROM_ZERO, DW_FROM_ZERO: dh and dw are 0 at first, and aren't read.
    """
    p, n, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ks, vs = p * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_in, v_in = ks < K, vs < V
    tile = ks[:, None] * V + vs[None, :]
    inside = k_in[:, None] & v_in[None, :]
    square, square_in = vs[:, None] * V + vs[None, :], v_in[:, None] & v_in[None, :]
    back = vs[None, :] * V + vs[:, None]  # W^T
    state = (b * N + n) * (K * V)
    w_ptr += (n // W_SHARED) * (V * V)
    dw_ptr += ((p * B + b) * N + n) * (V * V) + square
    dw_VV = tl.load(dw_ptr, mask=square_in & (not DW_FROM_ZERO), other=0.0)
    dh_KV = tl.load(dh_ptr + state + tile, mask=inside & (not DH_FROM_ZERO), other=0.0)
    q_ptr += b * q_b + (n // Q_SHARED) * q_n + ks
    k_ptr += b * k_b + (n // K_SHARED) * k_n + ks
    v_ptr += b * v_b + (n // V_SHARED) * v_n + vs
    f_ptr += b * f_b + (n // F_SHARED) * f_n
    dy_ptr += b * T * N * V + n * V + vs
    starts_ptr += b * T
    index_ptr += b * T
    dq_ptr += b * U * N * K + n * K + ks
    dk_ptr += b * U * N * K + n * K + ks
    dv_ptr += (p * B + b) * U * N * V + n * V + vs
    df_ptr += (p * B + b) * U * N + n
    kept = (tl.cast(n, tl.int64) * kept_n * B + b) * (K * V)
    before_ptr += kept
    z_ptr += kept
    step = B * (K * V)
    start_of_all = tl.cast(first, tl.int64)
    chunks = tl.cdiv(count, chunk_size)
    for i in range(chunks):
        offset = (chunks - 1 - i) * chunk_size
        size = tl.minimum(chunk_size, count - offset)
        t = start_of_all + offset
        if not AGAIN:
            place = t  # of the chunk in `before` and `z`
        else:
            place = t * 0
            w_VV = tl.load(w_ptr + square, mask=square_in, other=0.0).to(tl.float32)
            fronts = t // chunk_size * B * N * (K * V) + state + tile
            h_KV = tl.load(fronts_ptr + fronts, mask=inside, other=0.0)
            k_K = tl.load(k_ptr + t * k_t, mask=k_in, other=0.0).to(tl.float32)
            v_V = tl.load(v_ptr + t * v_t, mask=v_in, other=0.0).to(tl.float32)
            f = tl.load(f_ptr + t * f_t).to(tl.float32)
            start = tl.load(starts_ptr + t, mask=PACKED, other=0).to(tl.int32)
            index = tl.load(index_ptr + t, mask=PACKED, other=0)
            for c in range(size):
                more, u = c + 1 < size, t + c + 1
                next_k_K = tl.load(k_ptr + u * k_t, mask=k_in & more, other=0.0).to(tl.float32)
                next_v_V = tl.load(v_ptr + u * v_t, mask=v_in & more, other=0.0).to(tl.float32)
                next_f = tl.load(f_ptr + u * f_t, mask=more, other=0.0).to(tl.float32)
                next_start = tl.load(starts_ptr + u, mask=more & PACKED, other=0).to(tl.int32)
                next_index = tl.load(index_ptr + u, mask=more & PACKED, other=0)
                h_KV = begin(
                    h_KV, start, index, n, N, initial_ptr, tile, inside, PACKED, INITIAL, K, V
                )  # fmt: skip
                x_KV = tl.dot(h_KV, w_VV, acc=k_K[:, None] * v_V[None, :], input_precision="ieee")
                z_KV = tanh(x_KV)
                tl.store(before_ptr + c * step + tile, h_KV, mask=inside)
                tl.store(z_ptr + c * step + tile, z_KV, mask=inside)
                h_KV = z_KV + f * (h_KV - z_KV)
                k_K, v_V, f, start, index = next_k_K, next_v_V, next_f, next_start, next_index
            tl.debug_barrier()  # a thread may read what another wrote
        back_VV = tl.load(w_ptr + back, mask=square_in, other=0.0).to(tl.float32)
        # Each token's numbers are on their way while the one behind it is computed.
        u = t + size - 1
        before_ptr += (place + size - 1) * step
        z_ptr += (place + size - 1) * step
        before_KV = tl.load(before_ptr + tile, mask=inside, other=0.0)
        z_KV = tl.load(z_ptr + tile, mask=inside, other=0.0)
        q_K = tl.load(q_ptr + u * q_t, mask=k_in, other=0.0).to(tl.float32)
        k_K = tl.load(k_ptr + u * k_t, mask=k_in, other=0.0).to(tl.float32)
        v_V = tl.load(v_ptr + u * v_t, mask=v_in, other=0.0).to(tl.float32)
        f = tl.load(f_ptr + u * f_t).to(tl.float32)
        dy_V = tl.load(dy_ptr + u * (N * V), mask=v_in, other=0.0).to(tl.float32)
        for c in range(size):
            r = size - 1 - c
            u, more = t + r, r > 0
            start = tl.load(starts_ptr + u, mask=PACKED, other=0).to(tl.int32)
            w = u - 1
            before_ptr -= step
            z_ptr -= step
            next_before_KV = tl.load(before_ptr + tile, mask=inside & more, other=0.0)
            next_z_KV = tl.load(z_ptr + tile, mask=inside & more, other=0.0)
            next_q_K = tl.load(q_ptr + w * q_t, mask=k_in & more, other=0.0).to(tl.float32)
            next_k_K = tl.load(k_ptr + w * k_t, mask=k_in & more, other=0.0).to(tl.float32)
            next_v_V = tl.load(v_ptr + w * v_t, mask=v_in & more, other=0.0).to(tl.float32)
            next_f = tl.load(f_ptr + w * f_t, mask=more, other=0.0).to(tl.float32)
            next_dy_V = tl.load(dy_ptr + w * (N * V), mask=v_in & more, other=0.0).to(tl.float32)
            if CLIP == CARRIED:
                dh_KV = clip(dh_KV, bound)
            g_KV = dh_KV + q_K[:, None] * dy_V[None, :]
            if CLIP == TOTAL:
                g_KV = clip(g_KV, bound)
            gap_KV = before_KV - z_KV
            dx_KV = (1.0 - z_KV * z_KV) * (1.0 - f) * g_KV
            to = offset + r
            dq_K = tl.sum((z_KV + f * gap_KV) * dy_V[None, :], 1)
            tl.store(dq_ptr + to * (N * K), dq_K, mask=k_in)
            tl.store(dk_ptr + to * (N * K), tl.sum(dx_KV * v_V[None, :], 1), mask=k_in)
            tl.store(dv_ptr + to * (N * V), tl.sum(dx_KV * k_K[:, None], 0), mask=v_in)
            tl.store(df_ptr + to * N, tl.sum(tl.sum(gap_KV * g_KV, 1), 0))
            dw_VV = tl.dot(tl.trans(before_KV), dx_KV, acc=dw_VV, input_precision="ieee")
            dh_KV = tl.dot(dx_KV, back_VV, acc=f * g_KV, input_precision="ieee")
            if PACKED:
                ended_KV = tl.zeros_like(dh_KV)
                if DINITIAL or DFINAL:
                    begun = (tl.load(index_ptr + u) * N + n) * (K * V) + tile
                    leaves = inside & (start != 0)
                    if DINITIAL:  # a sequence starts once: no other program writes here
                        tl.store(dinitial_ptr + begun, dh_KV, mask=leaves)
                    if DFINAL:  # the sequence in front has the number before
                        ended = begun - N * (K * V)
                        ended_KV = tl.load(dfinal_ptr + ended, mask=leaves, other=0.0)
                dh_KV = tl.where(start != 0, ended_KV, dh_KV)
            before_KV, z_KV, q_K, k_K = next_before_KV, next_z_KV, next_q_K, next_k_K
            v_V, f, dy_V = next_v_V, next_f, next_dy_V
        before_ptr -= (place - 1) * step
        z_ptr -= (place - 1) * step
        tl.debug_barrier()  # all have read before the next chunk is written
    tl.store(dh_ptr + state + tile, dh_KV, mask=inside)
    tl.store(dw_ptr, dw_VV, mask=square_in)
