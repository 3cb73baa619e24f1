"""What R blocks have alive while they run, in forward and backward: moments inside the mixer.

It follows megacpp/blocks/m2rnn/module.py and megacpp/kernels/m2rnn/chunks.py as a trace sees them:
of packed rows a GPU has the states of one chunk twice more, as each token may start a document.

Legend: as megacpp/memory/forms/activation_m2rnn.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.blocks.m2rnn.descriptor import num_heads as m2rnn_heads
from megacpp.memory.forms.activation_m2rnn import channels, context_kind, m2rnn, num_states
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_desk import Desk, returned
from megacpp.memory.forms.working_frame import given
from megacpp.model.pieces import BLOCK, NOTHING


@dataclass(frozen=True)
class _Walk:
    """Sizes of the tensors that a mixer makes.

    Attributes:
        c, w: bytes of a number in the compute dtype and in the wide one.
        N, Y: heads and channels q | k of this rank.
        X: numbers of v, gate or output.
        past: tokens in front of this rank's chunks that convolutions borrow.
        tokens, heads: of one recurrence.
        state: numbers of one, of all rows and heads.
        chunk: tokens of a chunk.
        every: all states are kept; `kept`: how many.
        fused: by Triton's kernels, which have a state in registers (kernels/m2rnn_triton.py).
        serial: one chunk of the context axis after another.
    """

    own: Share
    c: int
    w: int
    N: int
    Y: int
    X: int
    past: int
    tokens: int
    heads: int
    state: int
    chunk: int
    every: bool
    kept: int
    fused: bool
    serial: bool

    @staticmethod
    def of(own: Share) -> _Walk:
        r = own.config.model.m2rnn
        N = m2rnn_heads(own.config.model) // own.tp
        kind = context_kind(own, N) if own.cp > 1 else "none"
        heads = N // own.cp if kind == "heads" else N
        tokens = own.here // own.chunks if kind == "serial" else own.row
        return _Walk(
            own=own,
            c=own.compute,
            w=own.wide,
            N=N,
            Y=sum(channels(own)),
            X=own.tokens * N * r.value_dim,
            past=own.rows * own.chunks * (r.conv_kernel - 1) if own.cp > 1 else 0,
            tokens=tokens,
            heads=heads,
            state=own.rows * heads * r.key_dim * r.value_dim,
            chunk=min(r.chunk_size, tokens),
            every=own.config.recompute.rblock == "none",
            kept=num_states(own, tokens),
            fused=own.by("m2rnn") == "triton",
            serial=kind == "serial",
        )

    @property
    def segments(self) -> int:
        """Recurrences, one after another."""
        return self.own.chunks if self.serial else 1

    def widened(self, numbers: int) -> int:
        return numbers * self.w if self.c < self.w else 0

    @property
    def thin(self) -> int:
        """Channels of the projections that are one product."""
        return self.Y + self.N

    @property
    def by_head(self) -> int:
        """Gradients of a chunk's q and k, a head's each, where heads share them."""
        r = self.own.config.model.m2rnn
        all_heads = m2rnn_heads(self.own.config.model)
        shared = (r.num_q_heads < all_heads) + (r.num_k_heads < all_heads)
        return self.chunk * self.own.rows * self.heads * shared * r.key_dim * self.w

    def taken(self, times_key: int, times_value: int) -> int:
        """Bytes of a chunk of inputs in the recurrence's dtype: of all heads."""
        r = self.own.config.model.m2rnn
        each = times_key * r.key_dim + times_value * r.value_dim + 1
        return self.chunk * self.own.rows * self.heads * each * self.w


def forward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """From projections to the norm."""
    k, n = _Walk.of(own), own.tokens
    c, w, kept = k.c, k.w, not pieces >= BLOCK
    desk = Desk(own)
    if own.parallel and kept:
        desk.put(weights=k.thin * own.config.model.dim * c)
    desk.put(thin=n * k.thin * c, v=k.X * c, gate=k.X * c)
    wanted = (n + k.past) * own.config.model.m2rnn.value_dim * k.N
    yield desk.moment("convolution of q and k", (n + k.past) * k.Y * (w + 2 * c))
    desk.put(convolved=(n + k.past) * k.Y * c)
    yield desk.moment("convolution of v", wanted * (w + 2 * c))
    desk.put(convolved=wanted * c, forget=(3 if kept else 1) * n * k.N * w)
    if not kept:
        desk.drop("thin", "v")
    rows = (n * each for group, n, each in m2rnn(own, NOTHING) if group == "exchanged")
    desk.put(exchanged=sum(rows))
    yield from _recurrence(k, desk)
    if not kept:
        desk.drop("states", "exchanged")
    yield from _gate(k, desk)
    yield desk.moment("output", k.X * c, own.tokens * own.config.model.dim * c)
    yield from returned(own, m2rnn(own, pieces))


def _recurrence(k: _Walk, desk: Desk) -> Iterator[Moment]:
    state = k.state * k.w
    desk.put(y=k.X * k.c)
    for _ in range(k.segments):
        desk.put(states=state * (k.kept + k.serial))
        if k.fused:
            yield desk.moment("recurrence", state)  # zeros that enter, or what leaves
            continue
        room = 0 if k.every else (2 * k.chunk + 1) * state
        yield desk.moment("recurrence", room, 2 * state, k.taken(2, 2))


def _gate(k: _Walk, desk: Desk) -> Iterator[Moment]:
    """Residual, gate and norm."""
    wide = k.X * k.w
    yield desk.moment("gate", 2 * wide + max(wide, k.widened(k.X)))
    desk.put(gated=wide)
    yield desk.moment("norm", 2 * wide)


def backward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """From the output's gradient to those of the projections."""
    k, r = _Walk.of(own), own.config.model.m2rnn
    c, wide = k.c, k.X * k.w
    desk = Desk(own, given=given(own, "R"), output=k.X * c, y=2 * k.X * c)
    desk.put(gated=wide * (2 if own.tp > 1 else 1))  # a cut norm keeps x / rms
    recurrence = _states(k)
    desk.put(states=recurrence)
    kept = sum(numbers * each for _, numbers, each in m2rnn(own, pieces))
    desk.put(rest=kept + desk.alive["given"] - sum(desk.alive.values()))
    desk.put(dy=k.X * c)
    yield desk.moment("output", desk.learn(own.config.model.dim * k.N * r.value_dim))
    desk.drop("given", "output", "dy")
    desk.put(dy=wide)
    # x / rms, its product with dy, dx
    yield desk.moment("norm", 3 * wide)
    desk.drop("gated")
    # gate widened, sum, its gradient's two factors, products with a weight; dy and dv narrow
    yield desk.moment("gate", k.widened(k.X), 4 * wide, 2 * k.X * c)
    desk.drop("dy", "y")
    desk.put(dy=k.X * c, dv=k.X * c, dgate=k.X * c)
    yield from _recurrence_back(k, desk)
    yield from _convolutions_back(k, desk)
    yield from _projections_back(k, desk)


def _states(k: _Walk) -> int:
    return (k.kept + k.serial) * k.segments * k.state * k.w


def _recurrence_back(k: _Walk, desk: Desk) -> Iterator[Moment]:
    """Chunk by chunk: states run again, their gradients, those of inputs."""
    n, w, V = k.own.tokens, k.w, k.own.config.model.m2rnn.value_dim
    state, parts = k.state * w, k.segments
    room = 0 if k.every else (2 * k.chunk + 1) * state
    # Beside a chunk's inputs the gradients that the one behind it left.
    inputs = k.taken(4, 3) if k.tokens > k.chunk else k.taken(2, 2)
    square = k.chunk * k.heads * V * V * w
    for _ in range(parts):
        made = n * (k.Y * k.c + k.N * w) + k.X * k.c
        desk.put(dinputs=made // parts)
        if k.fused:
            # Of a chunk: states in front and tanh again, their gradients; those of inputs by head.
            again = (1 if k.every else 3) * k.chunk * state
            states = (1 + 2 * k.serial) * state  # dL/dh; what came for the last, of the first
            yield desk.moment("recurrence", again, states, k.by_head)
            desk.put(states=-(_states(k) // parts))
            continue
        yield desk.moment("recurrence", room, 3 * k.chunk * state, 2 * state, inputs)
        yield desk.moment("state weight", room, 2 * k.chunk * state, 2 * state, inputs, square)
        desk.put(states=-(_states(k) // parts))
    desk.drop("dy")


def _convolutions_back(k: _Walk, desk: Desk) -> Iterator[Moment]:
    for name, numbers in (
        ("v", (k.own.tokens + k.past) * k.N * k.own.config.model.m2rnn.value_dim),
        ("q and k", (k.own.tokens + k.past) * k.Y),
    ):
        # sum, its gradient, x's; a neighbour's gradient, x widened and products of both
        passes = numbers * (3 * k.c + 2 * k.w) + k.widened(numbers)
        yield desk.moment(f"convolution of {name}", passes)


def _projections_back(k: _Walk, desk: Desk) -> Iterator[Moment]:
    """The gate, v, then the thin ones: gradients of what all read are added up."""
    own, D, X = k.own, k.own.config.model.dim, k.N * k.own.config.model.m2rnn.value_dim
    reads = own.tokens * D * k.c
    desk.reads = True
    desk.drop("rest", "dinputs")
    desk.put(dthin=own.tokens * k.thin * k.c)
    if own.parallel:
        desk.put(weights=k.thin * D * k.c)
    yield desk.moment("gate's projection", desk.learn(D * X), reads)
    desk.drop("dgate")
    yield desk.moment("v's projection", desk.learn(D * X), 2 * reads)
    desk.drop("dv")
    yield desk.moment("sum", 3 * reads)
    yield desk.moment("thin", desk.learn(D * k.thin), 3 * reads)
