"""Triton kernels of triton_gates.py.

Tokens lie `row_stride` and `token_stride` apart where they are read, results side by side. A
program has some tokens, and BLOCK of their N numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), also where it is small: log(u) e / (u - 1) with u = 1 + e rounded."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, tl.where(x == x, small, x))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _decay_kernel(
    x, A_log, bias, out, tokens, T,
    row_stride, token_stride,
    FACTOR: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the decay of each head, or its log."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (head < N)[None, :]
    start = (token // T).to(tl.int64) * row_stride + (token % T).to(tl.int64) * token_stride
    values = tl.load(x + start[:, None] + head[None, :], mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head, mask=head < N, other=0.0).to(tl.float32))
    values += tl.load(bias + head, mask=head < N, other=0.0).to(tl.float32)[None, :]
    result = -rate[None, :] * _softplus(values)
    if FACTOR:
        result = tl.exp(result)
    tl.store(out + token.to(tl.int64)[:, None] * N + head[None, :], result, mask=inside)


@triton.jit
def _decay_backward_kernel(
    dout, x, A_log, bias, dx, part, tokens, T,
    row_stride, token_stride,
    programs,
    FACTOR: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write gradients of x, and parts of those of A_log and bias."""
    program = tl.program_id(0)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.exp(tl.load(A_log + head, mask=head < N, other=0.0).to(tl.float32))[None, :]
    shift = tl.load(bias + head, mask=head < N, other=0.0).to(tl.float32)[None, :]
    dlog = tl.zeros([TOKENS, BLOCK], tl.float32)
    dbias = tl.zeros([TOKENS, BLOCK], tl.float32)
    for block in range(program, tl.cdiv(tokens, TOKENS), programs):
        token = block * TOKENS + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (head < N)[None, :]
        start = (token // T).to(tl.int64) * row_stride + (token % T).to(tl.int64) * token_stride
        place = token.to(tl.int64)[:, None] * N + head[None, :]
        values = tl.load(x + start[:, None] + head[None, :], mask=inside, other=0.0)
        values = values.to(tl.float32) + shift
        log = -rate * _softplus(values)
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        if FACTOR:
            d = d * tl.exp(log)
        dvalues = -d * rate * _sigmoid(values)
        tl.store(dx + place, dvalues.to(dx.dtype.element_ty), mask=inside)
        dlog += tl.where(inside, d * log, 0.0)
        dbias += tl.where(inside, dvalues, 0.0)
    place = part + program * 2 * N + head
    tl.store(place, tl.sum(dlog, 0), mask=head < N)
    tl.store(place + N, tl.sum(dbias, 0), mask=head < N)


@triton.jit
def _positive(a, SOFTPLUS: tl.constexpr):
    """Return -A before its floor, and its slope."""
    if SOFTPLUS:
        value = _softplus(a)
        slope = _sigmoid(a)
    else:
        below = 1.0 / (1.0 - a)
        value = tl.where(a >= 0.0, 1.0 + a, below)
        slope = tl.where(a >= 0.0, 1.0, below * below)
    return value, slope


@triton.jit
def _norm_groups(
    x, start, weight, out, token, tokens, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the RMSNorm of each group of tokens that begin at `start`; `out` is contiguous."""
    column = tl.arange(0, BLOCK_W)
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    place = x + start[:, None] + column[None, :]
    out += (token.to(tl.int64) * (GROUPS * WIDTH))[:, None] + column[None, :]
    for i in range(GROUPS):
        values = tl.load(place + i * WIDTH, mask=inside, other=0.0).to(tl.float32)
        values *= (1.0 / tl.sqrt(tl.sum(values * values, 1) / WIDTH + eps))[:, None]
        tl.store(out + i * WIDTH, (values * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_groups_backward(
    dy, x, start, weight, dx, total, token, tokens, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write gradients of groups; return `total` and those of the weight by these tokens.

    `dy` is contiguous, and so are tokens of two parts of groups in `dx`.
    """
    column = tl.arange(0, BLOCK_W)
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    place = x + start[:, None] + column[None, :]
    own = (token.to(tl.int64) * (GROUPS * WIDTH))[:, None]
    for i in range(GROUPS):
        values = tl.load(place + i * WIDTH, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + own + column[None, :] + i * WIDTH, mask=inside, other=0.0)
        d = d.to(tl.float32)
        one_over_rms = 1.0 / tl.sqrt(tl.sum(values * values, 1) / WIDTH + eps)
        # NaN where the squares overflowed: the group came out as zeros.
        one_over_rms = (one_over_rms / tl.where(one_over_rms == 0.0, 0.0, 1.0))[:, None]
        normed = values * one_over_rms
        total += d * normed
        d *= scale
        d = one_over_rms * (d - normed * (tl.sum(d * normed, 1) / WIDTH)[:, None])
        out = dx + 2 * own + column[None, :] + i * WIDTH
        tl.store(out, d.to(dx.dtype.element_ty), mask=inside)
    return total


@triton.jit
def _steps_kernel(
    dt, a, bias, bc, c_weight, b_weight, c, b, adt, step, tokens, T,
    row_stride, token_stride, bc_row_stride, bc_token_stride,
    floor, eps,
    SOFTPLUS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write log decay and step of each head, tokens side by side, and normed groups of C and B."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (head < N)[None, :]
    start = (token // T).to(tl.int64) * row_stride + (token % T).to(tl.int64) * token_stride
    place = start[:, None] + head[None, :]
    shift = tl.load(bias + head, mask=head < N, other=0.0).to(tl.float32)[None, :]
    size = _softplus(tl.load(dt + place, mask=inside, other=0.0).to(tl.float32) + shift)
    value, _ = _positive(tl.load(a + place, mask=inside, other=0.0).to(tl.float32), SOFTPLUS)
    value = tl.where(value < floor, floor, value)
    by_head = ((token // T).to(tl.int64) * N * T + token % T)[:, None] + head[None, :] * T
    tl.store(step + by_head, size, mask=inside)
    tl.store(adt + by_head, -value * size, mask=inside)
    if tl.program_id(1) == 0:
        start = (token // T).to(tl.int64) * bc_row_stride
        start += (token % T).to(tl.int64) * bc_token_stride
        _norm_groups(bc, start, b_weight, b, token, tokens, eps, GROUPS, WIDTH, BLOCK_W)
        start += GROUPS * WIDTH
        _norm_groups(bc, start, c_weight, c, token, tokens, eps, GROUPS, WIDTH, BLOCK_W)


@triton.jit
def _steps_backward_kernel(
    dc, db, dadt, dstep, dt, a, bias, bc, c_weight, b_weight, ddt, da, dbc, part, tokens, T,
    row_stride, token_stride, bc_row_stride, bc_token_stride,
    floor, eps, programs,
    SOFTPLUS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write gradients of dt, a, B and C, and parts of those of bias and both weights."""
    program = tl.program_id(0)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    shift = tl.load(bias + head, mask=head < N, other=0.0).to(tl.float32)[None, :]
    dbias = tl.zeros([TOKENS, BLOCK], tl.float32)
    dc_weight = tl.zeros([TOKENS, BLOCK_W], tl.float32)
    db_weight = tl.zeros([TOKENS, BLOCK_W], tl.float32)
    for block in range(program, tl.cdiv(tokens, TOKENS), programs):
        token = block * TOKENS + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (head < N)[None, :]
        start = (token // T).to(tl.int64) * row_stride + (token % T).to(tl.int64) * token_stride
        place = start[:, None] + head[None, :]
        by_head = ((token // T).to(tl.int64) * N * T + token % T)[:, None] + head[None, :] * T
        d = tl.load(dadt + by_head, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(dt + place, mask=inside, other=0.0).to(tl.float32) + shift
        value, slope = _positive(
            tl.load(a + place, mask=inside, other=0.0).to(tl.float32), SOFTPLUS
        )
        slope = tl.where(value < floor, 0.0, slope)
        value = tl.where(value < floor, floor, value)
        size = _softplus(x)
        dsize = tl.load(dstep + by_head, mask=inside, other=0.0).to(tl.float32) - d * value
        dx = dsize * _sigmoid(x)
        out = token.to(tl.int64)[:, None] * N + head[None, :]
        tl.store(ddt + out, dx.to(ddt.dtype.element_ty), mask=inside)
        tl.store(da + out, (-d * size * slope).to(da.dtype.element_ty), mask=inside)
        dbias += tl.where(inside, dx, 0.0)
        if tl.program_id(1) == 0:
            start = (token // T).to(tl.int64) * bc_row_stride
            start += (token % T).to(tl.int64) * bc_token_stride
            db_weight = _norm_groups_backward(
                db, bc, start, b_weight, dbc, db_weight, token, tokens, eps, GROUPS, WIDTH, BLOCK_W
            )
            start += GROUPS * WIDTH
            dc_weight = _norm_groups_backward(
                dc, bc, start, c_weight, dbc + GROUPS * WIDTH, dc_weight, token, tokens, eps,
                GROUPS, WIDTH, BLOCK_W,
            )  # fmt: skip
    part += program * (N + 2 * WIDTH)
    tl.store(part + head, tl.sum(dbias, 0), mask=head < N)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_W)
        tl.store(part + N + column, tl.sum(dc_weight, 0), mask=column < WIDTH)
        tl.store(part + N + WIDTH + column, tl.sum(db_weight, 0), mask=column < WIDTH)


@triton.jit
def _residual_kernel(
    y, v, D, g, out, tokens, T,
    row_stride, token_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the gated residual."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < N)[None, :]
    place = token.to(tl.int64)[:, None] * N + column[None, :]
    skip = tl.load(D + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    gate = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(v + place, mask=inside, other=0.0).to(tl.float32) * skip
    total += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total * gate * _sigmoid(gate), mask=inside)


@triton.jit
def _residual_backward_kernel(
    dout, y, v, D, g, dy, dv, dg, part, tokens, T,
    row_stride, token_stride,
    programs,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write gradients of y, v and g, and parts of that of D."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    skip = tl.load(D + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    dskip = tl.zeros([TOKENS, BLOCK], tl.float32)
    for block in range(program, tl.cdiv(tokens, TOKENS), programs):
        token = block * TOKENS + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (column < N)[None, :]
        place = token.to(tl.int64)[:, None] * N + column[None, :]
        gate = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(v + place, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(y + place, mask=inside, other=0.0).to(tl.float32) + values * skip
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        sigmoid = _sigmoid(gate)
        dtotal = d * gate * sigmoid
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(dy + place, dtotal.to(dy.dtype.element_ty), mask=inside)
        tl.store(dv + place, (dtotal * skip).to(dv.dtype.element_ty), mask=inside)
        tl.store(dg + place, (d * total * slope).to(dg.dtype.element_ty), mask=inside)
        dskip += tl.where(inside, dtotal * values, 0.0)
    tl.store(part + program * N + column, tl.sum(dskip, 0), mask=column < N)


@triton.jit
def _norm_kernel(
    x, z, weight, out, tokens, T,
    row_stride, token_stride, weight_stride,
    eps,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write norm(x) silu(z) of one head; x and out are contiguous."""
    token, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    h = tl.program_id(1)
    inside = (token < tokens)[:, None] & (column < N)[None, :]
    place = (token.to(tl.int64) * tl.num_programs(1) + h)[:, None] * N + column[None, :]
    start = (token // T).to(tl.int64) * row_stride + (token % T).to(tl.int64) * token_stride
    scale = tl.load(weight + h * weight_stride + column, mask=column < N, other=0.0).to(tl.float32)
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + (start + h * N)[:, None] + column[None, :], mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    values *= (1.0 / tl.sqrt(tl.sum(values * values, 1) / N + eps))[:, None]
    result = values * scale[None, :] * gate * _sigmoid(gate)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    dout, x, z, weight, dx, dz, part, tokens, T,
    row_stride, token_stride, weight_stride,
    eps, programs,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write gradients of x and z of one head, and parts of that of the weight; all contiguous."""
    program, h, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + h * weight_stride + column, mask=column < N, other=0.0).to(tl.float32)
    dscale = tl.zeros([TOKENS, BLOCK], tl.float32)
    for block in range(program, tl.cdiv(tokens, TOKENS), programs):
        token = block * TOKENS + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (column < N)[None, :]
        place = (token.to(tl.int64) * heads + h)[:, None] * N + column[None, :]
        start = (token // T).to(tl.int64) * row_stride + (token % T).to(tl.int64) * token_stride
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(z + (start + h * N)[:, None] + column[None, :], mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        one_over_rms = (1.0 / tl.sqrt(tl.sum(values * values, 1) / N + eps))[:, None]
        normed = values * one_over_rms
        sigmoid = _sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        dgate = d * normed * scale[None, :] * slope
        tl.store(dz + place, dgate.to(dz.dtype.element_ty), mask=inside)
        d *= gate * sigmoid
        dscale += tl.where(inside, d * normed, 0.0)
        d *= scale[None, :]
        d = one_over_rms * (d - normed * (tl.sum(d * normed, 1) / N)[:, None])
        tl.store(dx + place, d.to(dx.dtype.element_ty), mask=inside)
    tl.store(part + (program * heads + h) * N + column, tl.sum(dscale, 0), mask=column < N)
