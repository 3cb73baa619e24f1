"""What M blocks have alive while they run, in forward and backward: moments inside the mixer.

It follows megacpp/kernels/mamba3_*.py, causal_conv.py and recurrent_gates.py line by line; `narrow`
is a copy of something wide in the compute dtype and `widened` the other way round: of fp32 models
neither exists.

Legend: as activation_mamba3.py, with T tokens that the scan sees (padding included)
times its heads, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.memory.forms.activation_mamba3 import Mamba3Sizes, mamba3, operands
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment
from megacpp.memory.forms.working_desk import Desk, returned
from megacpp.memory.forms.working_frame import given
from megacpp.model.regions import Region


@dataclass(frozen=True)
class Walk:
    """Bytes of the tensors that a mixer makes.

    Attributes:
        c, w: of a number in the compute dtype and in the wide one.
        W: x or the gate, `[B, t, W]` numbers.
        T: numbers of one per token and head; padded.
        qk, v, angles, states: numbers of q (or k), of v for all ranks, of angles, of states.
        shared: numbers of Q (or K) before heads get their own.
        square: numbers of a C x C matrix per chunk and head; `scores` the same for all ranks.
    """

    z: Mamba3Sizes
    own: Share
    R: int
    c: int
    w: int
    W: int
    T: int
    qk: int
    v: int
    angles: int
    shared: int
    states: int
    square: int

    @staticmethod
    def of(own: Share, pieces: Pieces) -> Walk:
        z, m = Mamba3Sizes.of(own, "conv_bc" in pieces), own.config.model.mamba3
        T, R = z.padded * z.heads, m.mimo_rank
        return Walk(
            z=z,
            own=own,
            R=R,
            c=own.compute,
            w=own.wide,
            W=own.tokens * z.W,
            T=T,
            qk=T * R * m.d_state,
            v=T * R * m.headdim,
            angles=T * z.A,
            shared=z.padded * R * m.ngroups * m.d_state,
            states=z.segments * z.heads * z.chunks * m.d_state * m.headdim,
            square=T * (z.padded // (z.segments * z.chunks)),
        )

    @property
    def scores(self) -> int:
        return self.square * self.R**2

    @property
    def first(self) -> int:
        """Bytes of one state of every head and segment."""
        return self.states // self.z.chunks * self.w

    @property
    def carried(self) -> int:
        """States in front of every chunk and behind the last."""
        return self.states // self.z.chunks * (self.z.chunks + 1)

    def narrow(self, numbers: int) -> int:
        return numbers * self.c if self.c < self.w else 0

    def widened(self, numbers: int) -> int:
        return numbers * self.w if self.c < self.w else 0

    @property
    def convolved(self) -> tuple[int, int]:
        """Numbers of x and of B | C as they are convolved."""
        own, z = self.own, self.z
        tokens = own.tokens + own.rows * own.chunks * z.past
        return tokens * z.W, tokens * z.S


def forward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """From projections to the gate."""
    k, desk = Walk.of(own, pieces), Desk(own)
    n, z, c, w = own.tokens, k.z, k.c, k.w
    if own.parallel:
        desk.put(weights=z.thin * own.config.model.dim * c)
    desk.put(thin=n * z.thin * c, gate=k.W * c, x=k.W * c)
    if own.config.model.mamba3.conv_kernel:
        yield desk.moment("convolution", summed(k, k.convolved[0]))
        desk.put(convolved=sum(k.convolved) * c)
    desk.put(steps=n * z.H * (2 if z.again else 6) * w, norms=n * z.S * c)
    if z.states_travel:
        desk.put(carried=carried(k))
    elif z.by_heads:
        desk.put(exchanged=_group(own, frozenset[Region]({"conv_bc"}), "exchanged"))
    yield from _rotation(k, desk)
    if not z.again:  # all that is kept by now, and variables
        desk.alive = {"kept": _kept_by_now(k, pieces), "norms": n * z.S * c, "decay": n * z.H * w}
        if z.states_travel:
            desk.put(carried=carried(k))
        else:
            desk.put(v=k.W * c, gate=k.W * c if z.by_heads else 0)
        if z.all_leave:
            desk.put(thin=n * z.thin * c)
    yield from _scan(k, desk)
    yield from _gate(k, desk)
    desk.put(output=k.W * c)
    desk.drop("qk", "operands")
    if z.by_heads:  # in the order of ranks, to send, received, by token
        yield desk.moment("exchange", (1 + own.chunks) * k.W * c)
    yield desk.moment("output", own.tokens * own.config.model.dim * c)
    yield from returned(own, mamba3(own, pieces))


def _group(own: Share, pieces: Pieces, name: str) -> int:
    return sum(numbers * each for group, numbers, each in mamba3(own, pieces) if group == name)


def _kept_by_now(k: Walk, pieces: Pieces) -> int:
    """What a mixer whose pieces all stay keeps in front of its scan."""
    later = k.W * k.c + (k.carried + k.v) * k.w
    return kept_bytes(k.own, pieces) - _group(k.own, pieces, "entering states") - later


def carried(k: Walk) -> int:
    """Summaries of chunks, this rank's and all, and the states that they fold to."""
    own, z, m = k.own, k.z, k.own.config.model.mamba3
    state, all_chunks = own.rows * z.heads * m.d_state * m.headdim, own.cp * own.chunks
    numbers = z.heads * (2 + z.A + m.d_state * m.headdim + m.headdim)
    summary = own.rows * (numbers + k.R * z.groups * m.d_state)
    # Of each chunk: the token in front, the sum with it, that turned, and what leaves the chunk.
    folded = state * (1 + 4 * all_chunks)
    # The k and v of last tokens, and turns, are small beside them.
    token = own.rows * z.heads * (2 * k.R * m.d_state + 2 * m.headdim + 3 * z.A)
    # Added by own tokens, entering, and with its first token's part.
    numbers = summary * (own.chunks + all_chunks) + folded + 3 * own.chunks * state
    return (numbers + token * (own.chunks + all_chunks)) * k.w


def summed(k: Walk, numbers: int) -> int:
    """Sums of a convolution, and masked neighbours: the last one's, the next one's."""
    return numbers * (k.w + 2 * k.c)


def _rotation(k: Walk, desk: Desk, again: str = "") -> Iterator[Moment]:
    """Angles, q and k of every head, v of every rank, sums of log decays."""
    c, w = k.c, k.w
    desk.put(angles=k.angles * w, scales=3 * k.T * w)
    yield desk.moment(again + "angles", k.angles * w * 2)
    desk.put(qk=2 * k.qk * c)
    turning = 2 * k.shared * w + 2 * k.angles * w
    yield desk.moment(again + "rotation", turning, k.widened(k.qk))
    desk.put(v=k.v * c)
    if k.R > 1:
        desk.put(one=k.v // k.R * c)
        yield desk.moment(again + "ranks", k.widened(k.v))
    if k.z.again:
        desk.drop("angles", "one")
    else:
        desk.put(scales=4 * k.T * w)


def _scan(k: Walk, desk: Desk) -> Iterator[Moment]:
    """Products inside chunks, states, what outputs read of them."""
    c, w, inside = k.c, k.w, k.square * k.w
    desk.put(first=k.first)
    yield desk.moment("scores", inside, k.scores * w, k.narrow(k.scores))
    yield desk.moment("diagonals", inside, k.scores * w, 2 * k.T * k.R**2 * w)
    yield desk.moment("products", inside, k.narrow(k.scores), k.v * c)
    desk.put(outputs=k.v * w)
    yield desk.moment("outputs", inside, k.narrow(k.v))
    desk.put(states=k.carried * w, decays=2 * k.T * w)
    yield desk.moment("decayed", k.qk * w, k.narrow(k.qk))
    yield desk.moment("added", k.qk * c, k.states * c)
    yield desk.moment("entering", k.states * c, k.v * c)
    yield desk.moment("carried", k.v * c, k.widened(k.v), k.T * k.R * w)
    desk.drop("decays")


def _gate(k: Walk, desk: Desk, again: str = "") -> Iterator[Moment]:
    """Norm, gate, sum over ranks; outputs of several ranks are put in the order of tokens first."""
    w, ranks = k.w, k.W * k.R
    if k.R > 1 and not again:
        desk.put(ordered=k.v * w)
    normed = ranks * w + k.T * k.R * w if k.own.config.model.mamba3.out_norm else 0
    if k.R == 1:
        yield desk.moment(again + "gate", normed, k.widened(k.W), k.W * w)
        yield desk.moment(again + "gated", normed, k.W * w, k.narrow(k.W))
    else:
        yield desk.moment(again + "gate", normed, 2 * ranks * w)
        yield desk.moment(again + "gated", normed, 2 * ranks * w, k.W * w)


def backward(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """From the output's gradient to those of the projections."""
    k, desk = Walk.of(own, pieces), Desk(own, given=given(own, "M"))
    desk.put(gate=with_gate(k), ordered=k.v * k.w, states=k.carried * k.w)
    if not k.z.again:
        desk.put(**_operands(k))
    if not k.z.again or k.z.by_heads:
        desk.put(output=k.W * k.c)
    desk.put(rest=kept_bytes(own, pieces) - sum(desk.alive.values()) + desk.alive["given"])
    if "output" not in desk.alive:
        yield from _gate(k, desk, "again: ")
        desk.put(output=k.W * k.c)
    desk.put(dy=k.W * k.c)
    yield desk.moment("output", desk.learn(own.config.model.dim * k.z.W))
    desk.drop("given", "output")
    yield from gate_back(k, desk)
    if k.v != k.W * k.R:  # the gradient of padding is 0
        yield desk.moment("padded", k.v * k.w)
        desk.alive["dy"] = k.v * k.w
    desk.drop("ordered")
    if not (k.z.by_heads and k.z.again):  # x came together with the gate and is asked for again
        desk.drop("gate")
    if k.z.again:
        yield from _operands_again(k, desk, pieces)
    yield from _scan_back(k, desk)
    yield from _rotation_back(k, desk)
    yield from convolution_back(k, desk)
    yield from projections_back(k, desk)


def kept_bytes(own: Share, pieces: Pieces) -> int:
    return sum(numbers * each for _, numbers, each in mamba3(own, pieces))


def with_gate(k: Walk) -> int:
    """The gate, or what arrived with it where heads went for tokens."""
    own, z, m = k.own, k.z, k.own.config.model.mamba3
    if not z.by_heads:
        return k.W * k.c
    shares = k.z.groups % own.cp == 0
    bc = 2 * k.R * m.d_state * z.groups // own.cp if shares else 0
    return own.rows * own.row * (z.heads * (2 * m.headdim + 1) + bc) * k.c


def _operands(k: Walk) -> dict[str, int]:
    """What the scan reads and its neighbours keep."""
    found = {"qk": 2 * k.qk * k.c, "v": k.v * k.c, "angles": k.angles * k.w}
    return found | ({"one": k.v // k.R * k.c} if k.R > 1 else {})


def _operands_again(k: Walk, desk: Desk, pieces: Pieces) -> Iterator[Moment]:
    """All in front of the scan runs again; where heads went for tokens, from there on."""
    own, z, taps = k.own, k.z, k.own.config.model.mamba3.conv_kernel
    found = sum(numbers * each for _, numbers, each in operands(z))
    if not z.by_heads:
        found = kept_bytes(own, pieces - {"conv_bc"}) - kept_bytes(own, pieces) - k.W * k.c
        if z.past or (not taps and own.cp == 1):
            found += k.W * k.c  # without the piece nobody reads x behind its copy
        desk.put(results=own.tokens * z.S * k.c + k.T * k.w)  # Q, K and log decays
    if taps and not z.by_heads:
        desk.put(convolved=2 * own.tokens * z.S * k.c)
        yield desk.moment("again: convolution", summed(k, k.convolved[0]))
        desk.put(convolved=k.W * k.c)
    yield from _rotation(k, desk, "again: ")
    desk.drop("convolved", "scales")
    desk.alive |= _operands(k)
    desk.put(steps=found - sum(_operands(k).values()))


def gate_back(k: Walk, desk: Desk) -> Iterator[Moment]:
    """Leaves gradients of what the scan gave, wide, and of the gate."""
    w, ranks = k.w, k.W * k.R
    dz, normed = k.narrow(k.W), 0
    if k.own.config.model.mamba3.out_norm:
        normed = ranks * w + k.T * k.R * w
    if k.R == 1:
        # dy and gate widened, silu, product, dx, dgate
        passes = 2 * k.widened(k.W) + 4 * ranks * w
        yield desk.moment("gate", passes, normed, dz)
    else:
        # gate, silu, product, dy of ranks, dx, dgate, and a factor's products
        passes = 7 * ranks * w
        yield desk.moment("gate", passes, normed)
        passes = 5 * ranks * w + k.W * w
    if normed:
        yield desk.moment("norm", passes, normed, dz, 2 * ranks * w, k.T * k.R * w)
    desk.drop("dy")
    desk.put(dz=k.W * k.c, dy=ranks * w)


def _scan_back(k: Walk, desk: Desk) -> Iterator[Moment]:
    """Leaves gradients of q, k and v of every rank."""
    c, w, low = k.c, k.w, k.narrow(k.scores)
    first, diagonal = k.square * w + k.narrow(k.v), k.T * k.R**2 * w
    desk.put(last=k.first)
    if k.R > 1:
        desk.put(rows=k.v * w)  # dy in the order of chunks
    yield desk.moment("scores", first, k.scores * w, low)
    yield desk.moment("weights", first, k.scores * w, low, diagonal, k.v * c)
    desk.put(dv=k.v * c, dscores=k.scores * c, small=k.T * (w + k.R**2 * c))
    yield desk.moment("gradients of weights", first, 2 * diagonal)
    desk.put(dk=k.qk * c, decays=2 * k.T * w)
    yield desk.moment("gradients of outputs", k.v * w, k.narrow(k.v))
    desk.put(dcarried=k.v * c)
    yield desk.moment("entering", k.states * c, k.qk * c)
    yield desk.moment("gradient of q", 2 * k.qk * c)
    desk.drop("dscores")
    desk.put(dq=k.qk * c, dstates=k.carried * w)
    yield desk.moment("gradients of states", k.states * c)
    desk.drop("dcarried")
    yield desk.moment("gradient of k", k.states * c, k.qk * c)
    yield desk.moment("gradient of v", k.states * c, k.qk * w, k.narrow(k.qk))
    yield desk.moment("gradients of decays", k.qk * w, k.T * w)
    desk.put(small=2 * k.T * w)
    yield desk.moment("last states", k.states * w)
    desk.drop("dy", "rows", "v", "states", "dstates", "last", "decays")


def _rotation_back(k: Walk, desk: Desk) -> Iterator[Moment]:
    """Leaves gradients of Q, K and V."""
    c, w, turned = k.c, k.w, k.angles * k.R
    if k.R > 1:
        yield desk.moment("ranks", k.v * w + k.widened(k.v) + k.v // k.R * w)
        desk.drop("dv", "one")
        desk.put(dv=k.v // k.R * c)
    yield desk.moment("first rotation", 3 * k.angles * w, k.qk * w, k.angles * w, turned * w)
    yield desk.moment(
        "rotation", 3 * k.angles * w, k.shared * w, 2 * k.qk * w, k.angles * w, turned * w
    )
    desk.drop("qk", "dq", "dk")
    desk.put(dangles=k.angles * w, dQ=2 * k.shared * c)
    yield desk.moment("angles", 3 * k.angles * w)
    desk.drop("angles", "dangles")


def convolution_back(k: Walk, desk: Desk) -> Iterator[Moment]:
    """Leaves gradients of the projections."""
    own, c, w = k.own, k.c, k.w
    if own.config.model.mamba3.conv_kernel:
        numbers = k.convolved[0]
        # sum, its gradient, x's; a neighbour's gradient, x widened and products of both
        passes = numbers * (3 * c + 2 * w) + k.widened(numbers)
        yield desk.moment("convolution", passes)
    desk.drop("steps", "dQ")
    desk.put(dthin=own.tokens * k.z.S * c)


def projections_back(k: Walk, desk: Desk) -> Iterator[Moment]:
    """x, then the gate, then the thin ones: gradients of what all read are added up."""
    own, D = k.own, k.own.config.model.dim
    reads = own.tokens * D * k.c
    desk.reads = True
    yield desk.moment("x", desk.learn(D * k.z.W), reads)
    desk.drop("dv")
    yield desk.moment("gate", desk.learn(D * k.z.W), 2 * reads)
    desk.drop("dz")
    yield desk.moment("sum", 3 * reads)
    dthin = own.tokens * k.z.thin * k.c
    yield desk.moment("thin", desk.learn(D * k.z.thin), dthin, 3 * reads)
