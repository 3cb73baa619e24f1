"""Triton kernels of the Mamba-3 scan's numbers per token, and of what passes from chunk to chunk.

    gamma = dt lambda, scale[t] = gamma[t] + dt[t+1] (1 - lambda[t+1])       lambda = sigmoid(trap)
    turns = sum of tanh(a) dt / 2        sums = sum of adt        within a chunk and document

Legend: as triton_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _earlier(runs, b, token, T, PACKED: tl.constexpr):
    """Return [t, u]: u is t or an earlier token of its document."""
    earlier = token[None, :] <= token[:, None]
    if PACKED:
        run = tl.load(runs + b * T + token, mask=token < T, other=-1)
        earlier &= run[None, :] == run[:, None]
    return earlier


@triton.jit
def _rates_kernel(
    adt, dt, trap, angles, runs, sums, scale, gamma, turns, of_chunks, T, H, J,
    trap_row, trap_head, trap_token, angles_row, angles_token, angles_head,
    PACKED: tl.constexpr, A: tl.constexpr, C: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Store sums, scale, gamma and turns of a chunk, and the turns of its last token."""
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * H + h
    token = j * C + tl.arange(0, C)
    there, follows = token < T, token + 1 < T
    size = tl.load(dt + head * T + token, mask=there, other=0.0)
    trap += b * trap_row + h * trap_head + token.to(tl.int64) * trap_token
    own = size * tl.sigmoid(tl.load(trap, mask=there, other=0.0).to(tl.float32))
    ahead = tl.load(dt + head * T + token + 1, mask=follows, other=0.0)
    ahead *= tl.sigmoid(-tl.load(trap + trap_token, mask=follows, other=0.0).to(tl.float32))
    tl.store(gamma + head * T + token, own, mask=there)
    tl.store(scale + head * T + token, own + ahead, mask=there)

    earlier = _earlier(runs, b, token, T, PACKED)
    log = tl.load(adt + head * T + token, mask=there, other=0.0)
    s = tl.sum(tl.where(earlier, log[None, :], 0.0), 1)
    tl.store(sums + head * T + token, s, mask=there)

    a = tl.arange(0, BLOCK_A)
    inside = there[:, None] & (a < A)[None, :]
    angles += b * angles_row + h * angles_head
    angles += token.to(tl.int64)[:, None] * angles_token + a[None, :]
    turn = 0.5 * _tanh(tl.load(angles, mask=inside, other=0.0).to(tl.float32)) * size[:, None]
    turn = tl.dot(tl.where(earlier, 1.0, 0.0), turn, input_precision="tf32x3")
    tl.store(turns + (head * T + token)[:, None] * A + a[None, :], turn, mask=inside)
    last = tl.minimum(j * C + C, T) - 1
    turn = tl.sum(tl.where((token == last)[:, None], turn, 0.0), 0)
    tl.store(of_chunks + (head * J + j) * A + a, turn, mask=a < A)


@triton.jit
def _rates_backward_kernel(
    of_tokens, dturns, dleaving, dt, trap, angles, runs, dadt, ddt, dtrap, dangles, B, T, H, J,
    trap_row, trap_head, trap_token, dtrap_row, dtrap_head, dtrap_token, angles_row, angles_token,
    angles_head,
    SHARED: tl.constexpr, HEADS: tl.constexpr, PACKED: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Store the gradients of adt, dt, trap and angles, of HEADS heads; SHARED: of angles the sum.

    `dleaving` is the gradient of the angle behind each chunk; `dangles` is contiguous, with heads,
    or programs of HEADS heads, in front of tokens.
    """
    j, block, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = j * C + tl.arange(0, C)
    there, a = token < T, tl.arange(0, BLOCK_A)
    inside = there[:, None] & (a < A)[None, :]
    later = tl.trans(_earlier(runs, b, token, T, PACKED))
    leaves = there
    if PACKED:
        last = tl.load(runs + b * T + tl.minimum(j * C + C, T) - 1)
        leaves = last == tl.load(runs + b * T + token, mask=there, other=-1)
    total = tl.zeros([C, BLOCK_A], tl.float32)
    for i in range(HEADS):
        h = block * HEADS + i
        if h < H:
            head = b * H + h
            place, each = head * T + token, tl.cast(B * H, tl.int64) * T
            dsums = tl.load(of_tokens + place, mask=there, other=0.0)
            log = tl.sum(tl.where(later, dsums[None, :], 0.0), 1)
            tl.store(dadt + place, log, mask=there)

            size = tl.load(dt + place, mask=there, other=0.0)
            logit = trap + b * trap_row + h * trap_head + token.to(tl.int64) * trap_token
            mix = tl.sigmoid(tl.load(logit, mask=there, other=0.0).to(tl.float32))
            down = tl.load(of_tokens + place + each, mask=there, other=0.0)
            down += tl.load(of_tokens + place + 2 * each, mask=there, other=0.0)
            ahead = there & (token > 0)
            back = tl.load(of_tokens + place + each - 1, mask=ahead, other=0.0)
            out = dtrap + b * dtrap_row + h * dtrap_head + token.to(tl.int64) * dtrap_token
            dlogit = size * mix * (1.0 - mix) * (down - back)
            tl.store(out, dlogit.to(dtrap.dtype.element_ty), mask=there)

            moved = tl.load(dturns + place[:, None] * A + a[None, :], mask=inside, other=0.0)
            moved = tl.dot(tl.where(later, 1.0, 0.0), moved, input_precision="tf32x3")
            into = tl.load(dleaving + (head * J + j) * A + a, mask=a < A, other=0.0)
            moved += tl.where(leaves[:, None], into[None, :], 0.0)
            angle = angles + b * angles_row + h * angles_head + a[None, :]
            angle += token.to(tl.int64)[:, None] * angles_token
            rate = _tanh(tl.load(angle, mask=inside, other=0.0).to(tl.float32))
            dsize = tl.sum(moved * rate, 1) * 3.141592653589793
            dsize += down * mix + back * (1.0 - mix)
            tl.store(ddt + place, dsize, mask=there)
            moved *= 3.141592653589793 * size[:, None] * (1.0 - rate * rate)
            if SHARED:
                total += moved
            else:
                out = dangles + place[:, None] * A + a[None, :]
                tl.store(out, moved.to(dangles.dtype.element_ty), mask=inside)
    if SHARED:
        place = (b * tl.num_programs(1) + block) * T + token
        out = dangles + place[:, None] * A + a[None, :]
        tl.store(out, total.to(dangles.dtype.element_ty), mask=inside)


@triton.jit
def _carry_kernel(
    added, sums, runs, first, out, last, T, H, J, X,
    DECAY: tl.constexpr, BACKWARD: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    TURNS: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what enters each chunk, when a chunk keeps a part of that and adds to it.

    A document's end within the chunk keeps nothing. DECAY: else the part is exp(sum), or all.
    BACKWARD: from the last chunk to the first. LAST: store what leaves the row. TURNS: in fp64, and
    without whole turns.
    """
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, inside = b * H + h, x < X
    state = tl.zeros([BLOCK], tl.float64 if TURNS else tl.float32)
    if FIRST:
        state += tl.load(first + head * X + x, mask=inside, other=0.0)
    step = -1 if BACKWARD else 1
    j = J - 1 if BACKWARD else 0
    place = (head * J + j) * X + x
    more = tl.load(added + place, mask=inside, other=0.0)
    for i in range(J):
        if TURNS:
            state -= tl.floor(state)
        tl.store(out + place, state.to(out.dtype.element_ty), mask=inside)
        now = more
        more = tl.load(added + place + step * X, mask=inside & (i + 1 < J), other=0.0)
        ends = tl.minimum(j * C + C, T) - 1
        keep = 1.0
        if DECAY:
            keep = tl.exp(tl.load(sums + head * T + ends))
        if PACKED:
            row = runs + b * T
            passes = tl.load(row + ends) == tl.load(row + tl.maximum(j * C - 1, 0))
            state = tl.where(passes, state * keep, 0.0)
        else:
            state *= keep
        state += now
        j += step
        place += step * X
    if LAST:
        tl.store(last + head * X + x, state, mask=inside)
