"""Bytes that Muon keeps and that a step of it needs for a while, in closed form.

Shapes in, bytes out: nothing here knows of tensors. `Muon.transient_bytes` in optim/muon.py feeds
`step_peak_bytes` with its plan; a memory estimate without a plan takes `muon_transient_bytes`.

Legend: K matrices of a batch, R rows and C columns; s the short and l the long side of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIB = 1 << 20
BLOCK_CELLS = 1 << 20  # momenta are moved, and packed, so many cells at a time


def muon_state_bytes(cells: int, momentum_itemsize: int = 2) -> int:
    """The momentum of `cells` parameters; bf16 by default."""
    return cells * momentum_itemsize


def packing_bytes(cells: int, momentum_itemsize: int, gradient_itemsize: int) -> int:
    """Temporaries while the momentum of a block of `cells` moves and its update is packed.

    The momentum, then the update, in the gradient's dtype; and a narrower momentum, rounded.
    """
    narrow = momentum_itemsize if momentum_itemsize != gradient_itemsize else 0
    return cells * (gradient_itemsize + narrow)


def newton_schulz_bytes(count: int, rows: int, cols: int, itemsize: int) -> int:
    """Peak of a batch beyond its input, the result included: x, next x, and two products s x s.

    Sides are padded to multiples of 8, and `count` is what `least_batch` asks for at least.
    """
    short, long = (side + -side % 8 for side in sorted((rows, cols)))
    return itemsize * count * (2 * short * long + 2 * short * short)


@dataclass(frozen=True)
class WaveBytes:
    """Bytes of one wave on one rank (optim/exchange.py).

    Attributes:
        sent, received: on the way to the owners.
        returned, arriving: on the way back.
        packing, solving: temporaries of these.
        aside: temporaries of moving the momenta that another replica sends.
    """

    sent: int
    received: int = 0
    returned: int = 0
    arriving: int = 0
    packing: int = 0
    solving: int = 0
    aside: int = 0

    @property
    def sending(self) -> int:
        return self.sent + max(self.packing, self.received + self.aside)


def step_peak_bytes(
    waves: Sequence[WaveBytes], staying: Sequence[WaveBytes] = (), meanwhile: int = 0
) -> int:
    """Most bytes that a step has alive at once beside parameters, gradients and state.

    Wave k + 1 is sent before wave k is solved, and the results of wave k - 1 travel meanwhile: at
    most three waves are alive, each with what comes in and what goes out.

    Args:
        staying: what is solved where it lies, while the first wave is under way.
        meanwhile: temporaries of the AdamW half, which runs then too.
    """
    first = waves[0] if waves else WaveBytes(0)
    peak = first.sending
    flying = first.sent + first.received
    for wave in staying:
        peak = max(peak, flying + wave.sent + max(wave.packing, wave.solving))
    peak = max(peak, flying + meanwhile)
    nothing = WaveBytes(0)
    for k, wave in enumerate(waves):
        before = waves[k - 1] if k else nothing
        after = waves[k + 1] if k + 1 < len(waves) else nothing
        behind = before.returned + before.arriving
        ahead = after.sent + after.received
        sending = wave.sent + wave.received + behind
        solving = wave.received + wave.returned + behind + ahead + wave.solving
        returning = wave.returned + wave.arriving + behind + ahead
        peak = max(peak, sending + after.sending, solving, returning)
    return peak


def muon_transient_bytes(
    matrices: Iterable[tuple[int, int]],
    ranks: int,
    bucket_mib: int = 32,
    wire_itemsize: int = 2,
    momentum_itemsize: int = 2,
    gradient_itemsize: int = 4,
    batch_bytes: int = 64 * MIB,
) -> int:
    """No less than what a step needs where `ranks` share all these matrices `(rows, cols)`.

    Three waves of a bucket, or of all there is, each coming in and going out; the temporaries of
    packing a block; and those of a batch of `batch_bytes` (1 MiB on a CPU) or a larger matrix. One
    rank: the update of a few batches, packed.
    """
    sides = list(matrices)
    if not sides:
        return 0
    largest = max(rows * cols for rows, cols in sides)
    share = -(-sum(rows * cols for rows, cols in sides) // ranks)
    bucket = bucket_mib * MIB // wire_itemsize
    # A wave is at least one matrix: of that the owner gets all, a rank that cuts it sends its part.
    sent = min(max(bucket, -(-largest // ranks)), share)
    if ranks == 1:
        buffers = min(sent, max(batch_bytes // wire_itemsize, BLOCK_CELLS, largest))
    elif share <= bucket:
        buffers = 2 * share + largest  # one wave, of which an owner may have a matrix too many
    else:
        buffers = 3 * (sent + max(bucket, largest))
    block = max(min(BLOCK_CELLS, sent), -(-largest // ranks))
    packing = packing_bytes(block, momentum_itemsize, gradient_itemsize)
    solving = 0
    for (rows, cols), number in Counter(sides).items():
        cells = rows * cols * wire_itemsize
        count = min(number, max(1, batch_bytes // cells))
        work = newton_schulz_bytes(count, rows, cols, wire_itemsize)
        solving = max(solving, work + count * cells)  # put together from what arrived
    return buffers * wire_itemsize + max(packing, solving)
