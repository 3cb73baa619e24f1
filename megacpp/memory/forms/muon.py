"""Bytes of Muon's state, and of the temporaries of its step, in closed form.

Shapes in, bytes out: nothing here uses tensors. `Muon.transient_bytes` in optim/muon.py calls
`step_peak_bytes` with its plan; a memory estimate without a plan calls `muon_transient_bytes`.

Legend: K matrices of a batch, R rows and C columns; s the short and l the long side of a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIB = 1 << 20
BLOCK_CELLS = 1 << 20  # momenta are moved, and packed, so many cells at a time


def packing_bytes(cells: int, momentum_itemsize: int, gradient_itemsize: int) -> int:
    """Return bytes of temporaries while a block's momentum is updated and its update is packed.

    These are the momentum, then the update, in the gradient's dtype; and a rounded copy of a
    narrower momentum. The block has `cells` elements.
    """
    narrow = momentum_itemsize if momentum_itemsize != gradient_itemsize else 0
    return cells * (gradient_itemsize + narrow)


def newton_schulz_bytes(count: int, rows: int, cols: int, itemsize: int) -> int:
    """Return peak bytes of a batch beyond its input: x, next x, and two s x s products.

    Args:
        count: matrices of the batch, at least those that `least_batch` asks for.
        rows: of a matrix; sides are padded to multiples of 8.
        cols: of a matrix.
        itemsize: bytes of an element.
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
        """Peak bytes while the wave is packed and sent."""
        return self.sent + max(self.packing, self.received + self.aside)


def step_peak_bytes(waves: Sequence[WaveBytes], staying: Sequence[WaveBytes] = ()) -> int:
    """Return peak bytes of a step beyond parameters, gradients and state.

    Wave k + 1 is sent before wave k is solved, while the results of wave k - 1 travel: at most
    three waves are alive, each with its incoming and outgoing buffers.

    Args:
        waves: matrices that are sent to their owners, in order.
        staying: matrices that are solved in place while the first wave travels.
    """
    first = waves[0] if waves else WaveBytes(0)
    peak = first.sending
    flying = first.sent + first.received
    for wave in staying:
        peak = max(peak, flying + wave.sent + max(wave.packing, wave.solving))
    peak = max(peak, flying)
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
    beside: int = 0,
    staying: Iterable[tuple[int, int]] = (),
) -> int:
    """Return an upper bound of a step's temporary bytes, for matrices shared by `ranks`.

    It counts three waves of a bucket (or of all matrices), each with incoming and outgoing buffers;
    temporaries of packing a block; and those of a batch of `batch_bytes` or of one larger matrix.
    One rank packs the updates of a few batches only.

    Args:
        matrices: (rows, columns) of each.
        ranks: that share all matrices.
        bucket_mib: MiB of a wave.
        wire_itemsize: bytes of an element that travels and is orthogonalised.
        momentum_itemsize: bytes of an element of momentum.
        gradient_itemsize: bytes of an element of gradients.
        batch_bytes: of matrices that are orthogonalised together; 1 MiB on a CPU.
        beside: bytes that AdamW's temporaries take while the first wave travels.
        staying: (rows, columns) of those that lie whole on this rank, which solves them meanwhile.
    """
    sides, stay = list(matrices), list(staying)
    batch_bytes = min(batch_bytes, bucket_mib * MIB)  # a job is no larger than a wave
    types = wire_itemsize, momentum_itemsize, gradient_itemsize, batch_bytes
    alone = muon_transient_bytes(stay, 1, bucket_mib, *types) if stay else 0
    if not sides:
        return alone
    largest = max(rows * cols for rows, cols in sides)
    share = -(-sum(rows * cols for rows, cols in sides) // ranks)
    bucket = bucket_mib * MIB // wire_itemsize
    # A wave is at least one matrix: of that the owner gets all, a rank that cuts it sends its part.
    sent = min(max(bucket, -(-largest // ranks)), share)
    if ranks == 1:
        flying, buffers = 0, min(sent, max(batch_bytes // wire_itemsize, BLOCK_CELLS, largest))
        owned = share
    elif share <= bucket:
        owned = share + largest  # one wave; an owner may have a matrix too many
        flying = buffers = share + owned
    else:
        owned = max(bucket, largest)
        flying = sent + owned
        buffers = 3 * flying
    block = max(min(BLOCK_CELLS, sent), -(-largest // ranks))
    packing = packing_bytes(block, momentum_itemsize, gradient_itemsize)
    solving = 0
    for (rows, cols), number in Counter(sides).items():
        cells = rows * cols * wire_itemsize
        count = min(number, -(-owned // (rows * cols)), max(1, batch_bytes // cells))
        work = newton_schulz_bytes(count, rows, cols, wire_itemsize)
        together = count * cells if ranks > 1 else 0  # put together from what arrived
        solving = max(solving, work + together)
    least = flying * wire_itemsize + max(beside, alone)
    return max(buffers * wire_itemsize + max(packing, solving), least)
