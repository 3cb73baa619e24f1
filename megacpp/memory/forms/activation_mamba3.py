"""What M blocks keep for the backward.

Legend: n tokens of this rank, B rows, H heads of this rank, P head dim, W = H P, N state size, R
MIMO rank, A angles, S channels B | C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp.memory.forms.activation_share import INDEX, Kept, Pieces, Share

DOCUMENT = 1024  # tokens of one, where only data could say


@dataclass(frozen=True)
class Mamba3Sizes:
    """Sizes of a layer.

    Attributes:
        again: what lies around the scan runs again.
        by_heads: over the context axis, whole rows of some heads instead of some tokens of all.
        segments: rows of the scan: rows of the batch, or this rank's chunks of them.
        length: tokens of a segment.
        heads: of the scan.
        chunks: that a segment is cut into by the scan, the last one padded.
        padded: tokens of all segments with their padding.
    """

    own: Share
    again: bool
    H: int
    A: int
    S: int
    by_heads: bool
    segments: int
    length: int
    heads: int
    chunks: int
    padded: int

    @staticmethod
    def of(own: Share, again: bool) -> Mamba3Sizes:
        m = own.config.model.mamba3
        H = m.expand * own.config.model.dim // m.headdim // own.tp
        by_heads = own.cp > 1 and own.config.mesh.cp_mamba3 == "heads"
        segments = own.rows * (1 if by_heads else own.chunks)
        length = own.row if by_heads else own.here // own.chunks
        size = min(m.chunk_size, length)
        chunks = -(-length // size)
        return Mamba3Sizes(
            own=own,
            again=again,
            H=H,
            A=int(m.d_state * m.rope_fraction) // 2,
            S=2 * m.mimo_rank * m.ngroups * m.d_state,
            by_heads=by_heads,
            segments=segments,
            length=length,
            heads=H // own.cp if by_heads else H,
            chunks=chunks,
            padded=segments * chunks * size,
        )

    @property
    def W(self) -> int:
        return self.H * self.own.config.model.mamba3.headdim

    @property
    def thin(self) -> int:
        """Channels of the projections that are one product."""
        return self.S + 3 * self.H + self.A

    @property
    def past(self) -> int:
        """Tokens that a convolution borrows from the chunk before."""
        taps = self.own.config.model.mamba3.conv_kernel
        return max(0, taps - 1) if self.own.cp > 1 else 0

    @property
    def all_leave(self) -> bool:
        """Nobody reads the thin projections themselves, only wide or longer copies of them."""
        cast = self.own.compute < self.own.wide
        return self.by_heads and self.past > 0 and cast and not self.again

    @property
    def groups(self) -> int:
        return max(1, self.own.config.model.mamba3.ngroups // self.own.tp)

    @property
    def states_travel(self) -> bool:
        return self.own.cp > 1 and not self.by_heads

    @property
    def kernel(self) -> str | None:
        """The library kernel that scans; None: torch."""
        name = self.own.config.kernels.mamba3
        return name if name in ("mamba_ssm", "tilelang") else None

    @property
    def documents(self) -> int:
        """Whose number is data: one of so many tokens; at most, one for each chunk."""
        each = self.chunks if self.own.most else min(self.chunks, -(-self.length // DOCUMENT))
        return self.segments * each

    @property
    def kernel_chunks(self) -> int:
        """Chunks of a kernel, which cuts documents apart: a last one of each isn't full."""
        return self.segments * self.chunks + self.documents


def mamba3(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """Projections, what the scan reads, its states and outputs."""
    m, n, s, wide = own.config.model.mamba3, own.tokens, own.compute, own.wide
    z = Mamba3Sizes.of(own, "conv_bc" in pieces)
    if not z.all_leave:
        yield "projections", n * z.thin, s
    if not z.by_heads:
        yield "projections", n * z.W, s  # the gate
    if own.parallel:
        yield "weights", z.thin * own.config.model.dim, s
    yield from _convolved(z)
    if not z.again:
        yield from _steps(z)
    if z.kernel is not None:
        yield from by_kernel(z, z.kernel_chunks)
        if z.by_heads:
            yield "outputs", n * z.W, s
            yield from _exchanged(z)
        elif own.cp > 1:
            yield from folded(z)
        return
    if not z.again:
        yield from operands(z)
    yield "states", z.segments * z.heads * (z.chunks + 1) * m.d_state * m.headdim, wide
    yield "outputs", z.padded * z.heads * m.mimo_rank * m.headdim, wide
    if not z.again or z.by_heads:
        yield "outputs", n * z.W, s
    if z.by_heads:
        yield from _exchanged(z)
    elif own.cp > 1:
        yield from folded(z)


def _convolved(z: Mamba3Sizes) -> Iterator[Kept]:
    """x, and what the convolution makes of x, B and C; the scan copies its x."""
    own, s, n = z.own, z.own.compute, z.own.tokens
    taps, past = own.config.model.mamba3.conv_kernel, z.past
    if taps and own.parallel:
        yield "weights", z.S * taps, s
    raw = not past or z.again if taps else z.again or z.states_travel
    if raw and not (z.by_heads and not taps):
        yield "projections", n * z.W, s
    if past:  # tokens in front of each chunk, alone or together with the chunk
        length = past if z.again else past + own.here // own.chunks
        yield "scan inputs", own.rows * own.chunks * length * (z.W + z.S), s
    if taps and not z.again:
        cut = past if own.chunks == 1 else 0  # several chunks are copied out of the results
        wanted = z.S + (z.W if z.states_travel else 0)
        yield "scan inputs", own.rows * (own.here + cut) * wanted, s


def _steps(z: Mamba3Sizes) -> Iterator[Kept]:
    """Norms of B and C, the step dt and the decay A dt."""
    own, m, n, wide = z.own, z.own.config.model.mamba3, z.own.tokens, z.own.wide
    rate = 3 if m.a_activation == "heavy_tail" else 1
    cast = own.compute < wide
    yield "scan inputs", n * z.H * (3 + rate + cast), wide
    yield "scan inputs", n * 2 * m.mimo_rank * m.ngroups, wide
    if z.states_travel:  # the summary of a chunk reads them too
        yield "scan inputs", n * z.H, wide
        yield "scan inputs", n * z.S // 2, own.compute


def operands(z: Mamba3Sizes) -> Iterator[Kept]:
    """q, k and v in chunks, sums of log decays and of angles, weights of tokens."""
    own, m, h, wide = z.own, z.own.config.model.mamba3, z.heads, z.own.wide
    R, N, P = m.mimo_rank, m.d_state, m.headdim
    yield "scan inputs", z.padded * h * (2 * R * N + P + (R * P if R > 1 else 0)), own.compute
    yield "scan inputs", z.padded * h * 7, wide
    yield "scan inputs", z.padded * (h + 1) * z.A, wide
    yield "scan inputs", z.segments * z.length * z.A, wide
    if z.padded > z.segments * z.length:
        yield "scan inputs", z.padded * h, wide


def by_kernel(z: Mamba3Sizes, chunks: int) -> Iterator[Kept]:
    """What the kernels of mamba-ssm keep for their backward, inputs included.

    As their `save_for_backward` lists it (2.3.2.post1; tests/model/test_mamba3_interpreted.py and
    test_mamba3_mimo_interpreted.py count it). SISO: q and k of each head as they are rotated, the
    state in front of every chunk, outputs in front of the gate. MIMO: its inputs, contiguous, and
    no results.
    """
    own, m, h, c, wide = z.own, z.own.config.model.mamba3, z.heads, z.own.compute, z.own.wide
    R, N, P, tokens = m.mimo_rank, m.d_state, m.headdim, z.segments * z.length * z.heads
    if not z.again:
        yield "scan inputs", own.tokens * (z.S // 2 if z.states_travel else z.S), c  # Q, K
    if not (z.again or z.states_travel or z.by_heads):
        yield "scan inputs", tokens * P, c
        if z.kernel == "mamba_ssm":  # the log decay; MIMO keeps its contiguous copy alone
            yield "scan inputs", tokens, wide
    if z.states_travel and z.past and own.chunks == 1 and own.rows > 1:
        yield "scan inputs", tokens * P, c  # x without the tokens that it borrowed
    if z.states_travel:  # of packed rows, a state in front of every document
        yield "entering states", z.documents * h * (P * N + R * N + P), wide
    if z.kernel == "mamba_ssm":
        yield "scan inputs", tokens * (2 * N + z.A), c
        yield "scan inputs", tokens * 4 + chunks * h, wide
        yield "states", chunks * h * N * P, c
        yield "outputs", tokens * (3 if m.out_norm else 2) * P, c
        return
    yield "scan inputs", tokens * (2 + 2 * z.A), wide
    yield "scan inputs", tokens, c
    if m.out_norm or z.states_travel:
        yield "outputs", tokens * R * P, wide if z.states_travel else c
    yield "outputs", tokens * P, c


def folded(z: Mamba3Sizes) -> Iterator[Kept]:
    """States handed to the right: what chunks tell of themselves, and their fold up to this rank's.

    How many chunks come before depends on the rank: the folds.
    """
    own, m, h, B, wide = z.own, z.own.config.model.mamba3, z.heads, z.own.rows, z.own.wide
    R, N, P, A, S = m.mimo_rank, m.d_state, m.headdim, z.A, z.segments
    last = 2 * own.cp - 1 - own.context if own.chunks == 2 else own.context
    mimo, enters = R > 1, last > 0
    yield "entering states", S * h * P * N, wide
    yield "entering states", S * h * (2 + (enters or mimo)), wide
    if z.again:
        yield "entering states", S * h * A, wide
    if enters or mimo:
        yield "entering states", S * h * (R * N + P), wide
    if last > 1 or (enters and mimo):  # what was gathered; of the first chunk copies do
        numbers = h * (2 + A + P * N + P) + R * z.groups * N
        yield "entering states", own.cp * own.chunks * B * numbers, wide
    if enters:
        yield "entering states", S * h * (R * P if mimo else 0), wide
        yield "entering states", S, 1
        yield "entering states", last * B * h * (3 * P * N + 3 * A + 1), wide
        alone = B == 1 and not mimo  # v of one row needs no copy
        yield "entering states", (last - 1) * B * h * R * (N + (0 if alone else P)), wide
        if mimo:
            yield "entering states", B * h * (R * N + P), wide


def _exchanged(z: Mamba3Sizes) -> Iterator[Kept]:
    """Whole rows of this rank's heads: x, gate, step and decay, and where tokens came from."""
    own, m, h, wide = z.own, z.own.config.model.mamba3, z.heads, z.own.wide
    cut = z.groups % own.cp == 0
    bc = 2 * m.mimo_rank * m.d_state * z.groups
    numbers = h * (2 * m.headdim + 1) + (bc // own.cp if cut else 0)
    yield "exchanged", own.rows * own.row * numbers, own.compute
    fits = z.padded == z.segments * z.length  # else the scan reads a longer copy
    whole = z.again or z.kernel is not None  # inputs are kept as they arrived
    if fits or whole or own.compute == wide:
        yield "exchanged", own.rows * own.row * 2 * h, wide
    if whole:
        yield "exchanged", own.rows * own.row * (z.A + (0 if cut else bc)), own.compute
    if own.chunks == 2:
        sent = 1 + (own.compute < wide) + 1 + 1
        yield "exchanged", own.row * sent, INDEX
