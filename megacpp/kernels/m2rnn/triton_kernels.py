"""Triton kernels of the M2RNN recurrence: tokens forward, tokens backward, gradients of inputs.

    run              one program per row and head: its state stays in registers, tokens in order
    state_gradients  likewise from the last token to the first, with dL/dh in registers
    gradients        one program per token, row and head: none waits for another token

All numbers inside are fp32, whatever the inputs are; products are IEEE fp32, not TF32. A state is
padded to powers of two of at least 16 (`tl.dot`); its padding is zero and stays so.

Imported inside functions only: Triton is optional.

Legend: B rows, T tokens of a row, N heads, K key, V value, C tokens that a launch works on, X
chunks of a row. Strides are `_b` of rows, `_t` of tokens and `_n` of heads, in numbers; a vector
and a state are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

CARRIED = tl.constexpr(1)
TOTAL = tl.constexpr(2)
BY_ROW = tl.constexpr(1)
BY_SEQUENCE = tl.constexpr(2)


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


@triton.jit(do_not_specialize=["first", "count", "kept_first"])
def run_kernel(
    q_ptr, k_ptr, v_ptr, f_ptr, w_ptr, enter_ptr, starts_ptr, index_ptr, initial_ptr,
    y_ptr, fronts_ptr, final_ptr, before_ptr, z_ptr,
    first, count, B, N, chunk_size, kept_first, kept_n,
    q_b, q_t, q_n, k_b, k_t, k_n, v_b, v_t, v_n, f_b, f_t, f_n, T,
    Q_SHARED: tl.constexpr, K_SHARED: tl.constexpr, V_SHARED: tl.constexpr,
    F_SHARED: tl.constexpr, W_SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr, INITIAL: tl.constexpr,
    OUTPUTS: tl.constexpr, FRONTS: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Run tokens `first` to `first + count` of each row, from the states `enter` `[B, N, K, V]`.

    Writes, as asked: outputs `[B, T, N, V]`; states at chunk starts `[X, B, N, K, V]`; final
    states, one per row or sequence; per token the state in front of it, after a restart, and tanh,
    `[N, C, B, K, V]`, from place `kept_first` on. A program per head and row.

    Args:
        q_ptr, k_ptr, v_ptr, f_ptr, w_ptr, enter_ptr, starts_ptr, index_ptr, initial_ptr: read.
        y_ptr, fronts_ptr, final_ptr, before_ptr, z_ptr: written.
        first, count, chunk_size: tokens.
        B, N, T, K, V: sizes.
        kept_first, kept_n: first place and number of tokens in `before` and `z`.
        q_b, q_t, q_n, ...: strides of rows, tokens and heads.
        Q_SHARED, ...: neighbouring heads that share one of an input.
        BLOCK_K, BLOCK_V: padded K and V.
        PACKED, INITIAL: rows restart; initial states are given.
        OUTPUTS, FRONTS, FINAL, KEEP: what is written.
    """
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ks, vs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_in, v_in = ks < K, vs < V
    tile = ks[:, None] * V + vs[None, :]
    inside = k_in[:, None] & v_in[None, :]
    row = b * N + n
    w_VV = tl.load(
        w_ptr + (n // W_SHARED) * (V * V) + vs[:, None] * V + vs[None, :],
        mask=v_in[:, None] & v_in[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    h_KV = tl.load(enter_ptr + row * (K * V) + tile, mask=inside, other=0.0)
    here = tl.cast(first, tl.int64)
    q_ptr += b * q_b + here * q_t + (n // Q_SHARED) * q_n + ks
    k_ptr += b * k_b + here * k_t + (n // K_SHARED) * k_n + ks
    v_ptr += b * v_b + here * v_t + (n // V_SHARED) * v_n + vs
    f_ptr += b * f_b + here * f_t + (n // F_SHARED) * f_n
    y_ptr += (b * T + here) * N * V + n * V + vs
    starts_ptr += b * T + here
    index_ptr += b * T + here
    kept = (tl.cast(n, tl.int64) * kept_n + kept_first) * B + b
    before_ptr += kept * (K * V) + tile
    z_ptr += kept * (K * V) + tile
    fronts_ptr += row * (K * V) + tile
    # Each token's inputs are on their way while the one before it is computed.
    q_K = tl.load(q_ptr, mask=k_in & OUTPUTS, other=0.0).to(tl.float32)
    k_K = tl.load(k_ptr, mask=k_in, other=0.0).to(tl.float32)
    v_V = tl.load(v_ptr, mask=v_in, other=0.0).to(tl.float32)
    f = tl.load(f_ptr).to(tl.float32)
    start = tl.load(starts_ptr, mask=PACKED, other=0).to(tl.int32)
    for c in range(count):
        more = c + 1 < count
        q_ptr += q_t
        k_ptr += k_t
        v_ptr += v_t
        f_ptr += f_t
        starts_ptr += 1
        next_q_K = tl.load(q_ptr, mask=k_in & (more & OUTPUTS), other=0.0).to(tl.float32)
        next_k_K = tl.load(k_ptr, mask=k_in & more, other=0.0).to(tl.float32)
        next_v_V = tl.load(v_ptr, mask=v_in & more, other=0.0).to(tl.float32)
        next_f = tl.load(f_ptr, mask=more, other=0.0).to(tl.float32)
        next_start = tl.load(starts_ptr, mask=more & PACKED, other=1).to(tl.int32)
        if FRONTS:  # noqa: SIM102 - known when compiled, the other is not
            if c % chunk_size == 0:
                tl.store(fronts_ptr, h_KV, mask=inside)
                fronts_ptr += tl.cast(N, tl.int64) * B * (K * V)
        if PACKED:
            # where, not a product: a NaN of another document times zero would still be a NaN.
            begun_KV = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            if INITIAL:
                entered = (tl.load(index_ptr) * N + n) * (K * V) + tile
                begun_KV = tl.load(initial_ptr + entered, mask=inside & (start != 0), other=0.0)
            h_KV = tl.where(start != 0, begun_KV, h_KV)
        x_KV = tl.dot(h_KV, w_VV, acc=k_K[:, None] * v_V[None, :], input_precision="ieee")
        z_KV = tanh(x_KV)
        if KEEP:
            tl.store(before_ptr, h_KV, mask=inside)
            tl.store(z_ptr, z_KV, mask=inside)
            before_ptr += B * (K * V)
            z_ptr += B * (K * V)
        h_KV = z_KV + f * (h_KV - z_KV)
        if OUTPUTS:
            y_V = tl.sum(q_K[:, None] * h_KV, 0)
            tl.store(y_ptr, y_V.to(y_ptr.dtype.element_ty), mask=v_in)
            y_ptr += N * V
        if FINAL == BY_SEQUENCE:
            ended = (tl.load(index_ptr) * N + n) * (K * V) + tile
            tl.store(final_ptr + ended, h_KV, mask=inside & (next_start != 0))
        index_ptr += 1
        q_K, k_K, v_V, f, start = next_q_K, next_k_K, next_v_V, next_f, next_start
    if FINAL == BY_ROW:
        tl.store(final_ptr + row * (K * V) + tile, h_KV, mask=inside)


@triton.jit(do_not_specialize=["first", "count", "kept_first"])
def state_gradients_kernel(
    q_ptr, f_ptr, dy_ptr, w_ptr, z_ptr, g_ptr, dh_ptr, starts_ptr, index_ptr,
    dinitial_ptr, dfinal_ptr, bound,
    first, count, B, N, kept_first, kept_n, scratch_n,
    q_b, q_t, q_n, f_b, f_t, f_n, T,
    Q_SHARED: tl.constexpr, F_SHARED: tl.constexpr, W_SHARED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr, DINITIAL: tl.constexpr, DFINAL: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Compute dL/dh of tokens `first + count` to `first`, backwards, into g `[N, C, B, K, V]`.

    `dh` `[B, N, K, V]` is the gradient that comes from tokens behind these and becomes the one that
    goes to tokens in front of them. With x the argument of tanh, dL/dx = (1 - f) (1 - tanh^2) dL/dh
    and dL/dh_{t-1} = f dL/dh_t + dL/dx_t W^T + q_{t-1} dy_{t-1}^T. A program per head and row.

    Args:
        q_ptr, f_ptr, dy_ptr, w_ptr, z_ptr, starts_ptr, index_ptr, dfinal_ptr: read.
        g_ptr, dh_ptr, dinitial_ptr: written.
        bound: of the clip.
        first, count: tokens.
        B, N, T, K, V: sizes.
        kept_first, kept_n: first place and number of tokens in `z`.
        scratch_n: number of tokens in `g`.
        q_b, q_t, q_n, ...: strides of rows, tokens and heads.
        Q_SHARED, ...: neighbouring heads that share one of an input.
        BLOCK_K, BLOCK_V: padded K and V.
        PACKED, DINITIAL, DFINAL: rows restart; gradients of initial and final states.
        CLIP: which gradient is clipped; 0: none.
    """
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ks, vs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_in, v_in = ks < K, vs < V
    tile = ks[:, None] * V + vs[None, :]
    inside = k_in[:, None] & v_in[None, :]
    row = b * N + n
    back_VV = tl.load(  # W^T
        w_ptr + (n // W_SHARED) * (V * V) + vs[None, :] * V + vs[:, None],
        mask=v_in[:, None] & v_in[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    dh_KV = tl.load(dh_ptr + row * (K * V) + tile, mask=inside, other=0.0)
    last = tl.cast(first, tl.int64) + count - 1
    q_ptr += b * q_b + last * q_t + (n // Q_SHARED) * q_n + ks
    f_ptr += b * f_b + last * f_t + (n // F_SHARED) * f_n
    dy_ptr += (b * T + last) * N * V + n * V + vs
    starts_ptr += b * T + last
    index_ptr += b * T + last
    head = tl.cast(n, tl.int64)
    z_ptr += ((head * kept_n + kept_first + count - 1) * B + b) * (K * V) + tile
    g_ptr += ((head * scratch_n + count - 1) * B + b) * (K * V) + tile
    # Each token's numbers are on their way while the one behind it is computed.
    z_KV = tl.load(z_ptr, mask=inside, other=0.0)
    q_K = tl.load(q_ptr, mask=k_in, other=0.0).to(tl.float32)
    dy_V = tl.load(dy_ptr, mask=v_in, other=0.0).to(tl.float32)
    f = tl.load(f_ptr).to(tl.float32)
    for c in range(count):
        more = c + 1 < count
        z_ptr -= B * (K * V)
        q_ptr -= q_t
        dy_ptr -= N * V
        f_ptr -= f_t
        next_z_KV = tl.load(z_ptr, mask=inside & more, other=0.0)
        next_q_K = tl.load(q_ptr, mask=k_in & more, other=0.0).to(tl.float32)
        next_dy_V = tl.load(dy_ptr, mask=v_in & more, other=0.0).to(tl.float32)
        next_f = tl.load(f_ptr, mask=more, other=0.0).to(tl.float32)
        start = tl.load(starts_ptr, mask=PACKED, other=0).to(tl.int32)
        if CLIP == CARRIED:
            dh_KV = clip(dh_KV, bound)
        g_KV = dh_KV + q_K[:, None] * dy_V[None, :]
        if CLIP == TOTAL:
            g_KV = clip(g_KV, bound)
        tl.store(g_ptr, g_KV, mask=inside)
        g_ptr -= B * (K * V)
        dx_KV = (1.0 - z_KV * z_KV) * (1.0 - f) * g_KV
        dh_KV = tl.dot(dx_KV, back_VV, acc=f * g_KV, input_precision="ieee")
        if PACKED:
            ended_KV = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            if DINITIAL or DFINAL:
                begun = (tl.load(index_ptr) * N + n) * (K * V) + tile
                leaves = inside & (start != 0)
                if DINITIAL:  # a sequence starts once: no other program writes here
                    tl.store(dinitial_ptr + begun, dh_KV, mask=leaves)
                if DFINAL:  # the sequence in front has the number before
                    ended = begun - N * (K * V)
                    ended_KV = tl.load(dfinal_ptr + ended, mask=leaves, other=0.0)
            dh_KV = tl.where(start != 0, ended_KV, dh_KV)
            starts_ptr -= 1
            index_ptr -= 1
        z_KV, q_K, dy_V, f = next_z_KV, next_q_K, next_dy_V, next_f
    tl.store(dh_ptr + row * (K * V) + tile, dh_KV, mask=inside)


@triton.jit(do_not_specialize=["first", "kept_first"])
def gradients_kernel(
    k_ptr, v_ptr, f_ptr, dy_ptr, before_ptr, z_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr, df_ptr,
    first, B, N, kept_first, kept_n, scratch_n,
    k_b, k_t, k_n, v_b, v_t, v_n, f_b, f_t, f_n, T,
    dq_b, dq_t, dk_b, dk_t, dv_b, dv_t, df_b, df_t,
    K_SHARED: tl.constexpr, V_SHARED: tl.constexpr, F_SHARED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute gradients of one token's q, k, v and f for one head; dL/dx replaces g = dL/dh.

    A program per token, head and row.

    Args:
        k_ptr, v_ptr, f_ptr, dy_ptr, before_ptr, z_ptr: read.
        g_ptr, dq_ptr, dk_ptr, dv_ptr, df_ptr: written.
        first: token.
        B, N, T, K, V: sizes.
        kept_first, kept_n: first place and number of tokens in `before` and `z`.
        scratch_n: number of tokens in `g`.
        k_b, k_t, k_n, ..., dq_b, dq_t, ...: strides of rows, tokens and heads.
        K_SHARED, ...: neighbouring heads that share one of an input.
        BLOCK_K, BLOCK_V: padded K and V.
    """
    c, n = tl.program_id(0), tl.program_id(1)
    b, head = tl.program_id(2).to(tl.int64), n.to(tl.int64)
    ks, vs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_in, v_in = ks < K, vs < V
    tile = ks[:, None] * V + vs[None, :]
    inside = k_in[:, None] & v_in[None, :]
    t = tl.cast(first, tl.int64) + c
    kept = ((head * kept_n + kept_first + c) * B + b) * (K * V) + tile
    g_ptr += ((head * scratch_n + c) * B + b) * (K * V) + tile
    before_KV = tl.load(before_ptr + kept, mask=inside, other=0.0)
    z_KV = tl.load(z_ptr + kept, mask=inside, other=0.0)
    g_KV = tl.load(g_ptr, mask=inside, other=0.0)
    k_K = tl.load(k_ptr + b * k_b + t * k_t + (n // K_SHARED) * k_n + ks, mask=k_in, other=0.0)
    v_V = tl.load(v_ptr + b * v_b + t * v_t + (n // V_SHARED) * v_n + vs, mask=v_in, other=0.0)
    f = tl.load(f_ptr + b * f_b + t * f_t + (n // F_SHARED) * f_n).to(tl.float32)
    dy_V = tl.load(dy_ptr + (b * T + t) * N * V + n * V + vs, mask=v_in, other=0.0).to(tl.float32)
    gap_KV = before_KV - z_KV
    dx_KV = (1.0 - z_KV * z_KV) * (1.0 - f) * g_KV
    dq_K = tl.sum((z_KV + f * gap_KV) * dy_V[None, :], 1)
    dk_K = tl.sum(dx_KV * v_V.to(tl.float32)[None, :], 1)
    dv_V = tl.sum(dx_KV * k_K.to(tl.float32)[:, None], 0)
    df = tl.sum(tl.sum(gap_KV * g_KV, 1), 0)
    tl.debug_barrier()  # every thread reads its g before any is overwritten
    tl.store(g_ptr, dx_KV, mask=inside)
    dq_ptr += b * dq_b + c * dq_t + n * K + ks
    dk_ptr += b * dk_b + c * dk_t + n * K + ks
    dv_ptr += b * dv_b + c * dv_t + n * V + vs
    df_ptr += b * df_b + c * df_t + n
    tl.store(dq_ptr, dq_K.to(dq_ptr.dtype.element_ty), mask=k_in)
    tl.store(dk_ptr, dk_K.to(dk_ptr.dtype.element_ty), mask=k_in)
    tl.store(dv_ptr, dv_V.to(dv_ptr.dtype.element_ty), mask=v_in)
    tl.store(df_ptr, df.to(df_ptr.dtype.element_ty))
