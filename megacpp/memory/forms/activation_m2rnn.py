"""What R blocks keep for the backward.

Legend: n tokens of this rank, B rows, D model, N heads of this rank, K key, V value, X = N V, Y
channels q | k.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.blocks.m2rnn.descriptor import num_heads as m2rnn_heads
from megacpp.memory.forms.activation_share import INDEX, Kept, Pieces, Share
from megacpp.model.pieces import BLOCK


def m2rnn(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """Projections, convolutions, the recurrence's inputs and states, gate and norm."""
    r, n, s, wide = own.config.model.m2rnn, own.tokens, own.compute, own.wide
    N = m2rnn_heads(own.config.model) // own.tp
    X, serial = N * r.value_dim, own.cp > 1 and context_kind(own, N) == "serial"
    if serial:
        yield "states", own.rows * own.chunks, INDEX  # numbers of rows
    if pieces >= BLOCK:
        return
    Y = sum(channels(own))
    if own.parallel:
        yield "weights", (Y + N) * own.config.model.dim + Y * r.conv_kernel, s
        yield "weights", 2 * N, wide
    yield "projections", n * X, s  # the gate
    yield from _convolved(own, N, X, Y, serial)
    yield "scan inputs", n * 3 * N, wide  # forget values on their way
    if own.cp == 1:
        yield from _states(own, own.here, N)
    elif serial:
        for chunk in _own_chunks(own):
            yield from _states(own, own.here // own.chunks, N)
            yield "states", own.rows * N * r.key_dim * r.value_dim, wide
            yield "states", own.rows * (chunk > 0), 1
    else:
        yield from _exchanged(own, N)
        yield from _states(own, own.row, N // own.cp)
    yield "outputs", n * 2 * X, s  # before the gate and behind the norm
    yield "outputs", n * (X * (2 if own.tp > 1 else 1) + 1), wide  # a cut norm keeps x / rms


def channels(own: Share) -> tuple[int, int]:
    """Of q and of k; heads that all share are whole on every rank."""
    r = own.config.model.m2rnn
    q, k = ((x // own.tp if x > 1 else x) for x in (r.num_q_heads, r.num_k_heads))
    return q * r.key_dim, k * r.key_dim


def context_kind(own: Share, heads: int) -> str:
    """How it meets the context axis; `auto`: heads where they divide."""
    wanted = own.config.mesh.cp_m2rnn
    return ("serial" if heads % own.cp else "heads") if wanted == "auto" else wanted


def _own_chunks(own: Share) -> tuple[int, ...]:
    """Numbers of the chunks of a row that this rank holds."""
    mine = own.context
    return (mine,) if own.chunks == 1 else (mine, 2 * own.cp - 1 - mine)


def _convolved(own: Share, N: int, X: int, Y: int, serial: bool) -> Iterator[Kept]:
    """What is convolved, and q, k and v that come out."""
    n, s, past = own.tokens, own.compute, own.config.model.m2rnn.conv_kernel - 1
    if own.cp == 1 or not past:
        yield "projections", n * (Y + N + X), s
        past = 0
    else:
        cut = own.rows * (own.here + own.chunks * past)
        yield "scan inputs", cut * (X + Y), s
    behind = past if own.chunks == 1 else 0
    wanted = X + (Y if own.cp == 1 or serial else 0)  # else q and k have left
    yield "scan inputs", own.rows * (own.here + behind) * wanted, s


def _states(own: Share, tokens: int, heads: int) -> Iterator[Kept]:
    """Where chunks start, or of every token, before and after, and its tanh."""
    r = own.config.model.m2rnn
    numbers = own.rows * heads * r.key_dim * r.value_dim
    yield "states", num_states(own, tokens) * numbers, own.wide


def num_states(own: Share, tokens: int) -> int:
    """That a recurrence over so many tokens keeps; Triton's has no use for the one behind them."""
    if own.config.recompute.rblock == "none":
        return 2 * tokens + (own.by("m2rnn") != "triton")
    return -(-tokens // own.config.model.m2rnn.chunk_size)


def _exchanged(own: Share, N: int) -> Iterator[Kept]:
    """Whole rows of this rank's heads, and where tokens came from."""
    r, all_tokens, s, wide = own.config.model.m2rnn, own.rows * own.row, own.compute, own.wide
    shared = 0
    yield "exchanged", all_tokens * N // own.cp * r.value_dim, s
    yield "exchanged", all_tokens * N // own.cp, wide
    for width in channels(own):
        divides = width // r.key_dim % own.cp == 0
        shared += not divides
        yield "exchanged", all_tokens * width // (own.cp if divides else 1), s
    if own.chunks == 2:
        sent = 1 + (s < wide) + (shared > 0) + 1
        yield "exchanged", own.row * sent, INDEX
