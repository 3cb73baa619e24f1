"""Working set of an E mixer, without the frame around it (working_frame.py).

Legend: m tokens that this rank routes, n those that the shared expert sees, D model, Z rows that
leave for other ranks, R that arrive (without `ep`: the m tokens), S slots of this rank's experts, I
hidden units of an expert; s bytes of a number in compute, w of what is never narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megacpp.blocks.attention.choices import columns
from megacpp.memory.forms.activation_experts import Trip, trip_of
from megacpp.memory.forms.activation_share import Pieces, Share
from megacpp.memory.forms.moment import Moment, one_at_a_time
from megacpp.memory.forms.working_blocks import gated_backward, gated_forward
from megacpp.memory.forms.working_frame import given, gradient_bytes, kept_groups

BLOCKS = 16  # in which the hidden units of experts are worked on (kernels/expert_mlp.py)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the tensors of a layer.

    Attributes:
        token, row: a residual stream of compute numbers, and one of wide ones.
        leave, arrive, slots: rows in compute; without `ep` nothing leaves or arrives.
        units: gate (and up) of the routed experts; `unit`: one of them.
        here: rows that arrive are weighed and summed on the experts' rank.
        fused: by kernels that write nothing that is wide, but sums of rows.
        small: scores, places and weights of copies.
        weighed: rows that came back, kept where they are weighed.
        shared: what the shared expert keeps.
    """

    own: Share
    trip: Trip
    token: int
    wide_token: int
    leave: int
    arrive: int
    slots: int
    unit: int
    units: int
    here: bool
    fused: bool
    small: int
    weighed: int
    hidden: int
    shared: int

    @staticmethod
    def of(own: Share, pieces: Pieces) -> _Sizes:
        moe, mesh, D, s = own.config.model.moe, own.config.mesh, own.config.model.dim, own.compute
        trip = trip_of(own)
        spread = mesh.ep > 1
        here = not spread or (moe.capacity_factor is None and mesh.ep_dispatch == "per_rank")
        leave, arrive = (trip.leaving * D * s, trip.arriving * D * s) if spread else (0, 0)
        unit = trip.slots * moe.hidden_dim * s
        units = unit * (2 if moe.activation == "swiglu" else 1)
        groups = kept_groups(own, "E", pieces)
        hidden = 0 if pieces & {"expert_gemm", "block"} else units
        whole = "block" in pieces
        weighed = 0 if here or whole else leave
        return _Sizes(
            own=own,
            trip=trip,
            token=own.stream * D * s,
            wide_token=own.stream * D * own.wide,
            leave=leave,
            arrive=arrive,
            slots=trip.slots * D * s,
            unit=unit,
            units=units,
            here=here,
            fused=own.by("experts") == "triton",
            small=groups["routing"] + groups["rows"] - (0 if whole else arrive + weighed),
            weighed=weighed,
            hidden=hidden,
            shared=groups["normed"] + groups["hidden units"] - hidden,
        )

    @property
    def row(self) -> int:
        return self.own.config.model.dim * self.own.compute

    def sum_of(self, rows: int, terms: int, rounds: bool = True) -> int:
        """Rows added up in fp32, `terms` to each of as many as `rows` bytes of compute numbers.

        The sum, and one term as it came and widened; a kernel adds up terms as they come, and then
        the sum is rounded, if it is (`rounds`).
        """
        s, w = self.own.compute, self.own.wide
        wide = rows // s * w
        if self.fused:
            return wide + (rows if rounds and s < w else 0)
        return wide * min(2, terms) + (rows if s < w else 0)


def experts(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """Routing, dispatch, routed experts, their rows back, the shared expert."""
    z, moe, mesh = _Sizes.of(own, pieces), own.config.model.moe, own.config.mesh
    base, each = z.small + z.arrive, min(columns(moe), moe.num_experts // mesh.ep)
    if z.arrive:
        yield Moment("rows leave", base + z.leave)
        base += 0 if not z.here else z.trip.arriving * 2 * each * own.wide  # with their labels
    yield Moment("into experts", base + z.slots + z.units)
    yield Moment("hidden units", base + z.units + z.unit + _blocks(own, z, forward=True))
    yield Moment("out of experts", base + z.units + z.unit + z.slots)
    base += z.hidden
    if not z.arrive:
        yield Moment("sum of rows", base + z.slots + z.sum_of(z.token, columns(moe), False))
    elif z.here:
        yield Moment("sum of copies", base + z.slots + z.sum_of(z.arrive, each))
        came = z.slots + z.arrive + z.leave
        yield Moment("sum of rows", base + came + z.sum_of(z.token, columns(moe), False))
    else:
        came = z.slots + z.arrive + z.leave
        yield Moment("weighted rows", base + came + z.sum_of(z.token, 2, False))
    base += z.weighed + z.wide_token
    if moe.num_shared:
        for moment in _shared(z, pieces):
            yield moment.more(base)
        yield Moment("sum of experts", base + z.shared + z.token + z.wide_token)


def experts_back(own: Share, pieces: Pieces) -> Iterator[Moment]:
    """The shared expert, rows out, routed experts, rows back."""
    for moment in _experts_back(own, pieces):  # only where one is made there is a fresh one
        yield moment if moment.fresh is not None else replace(moment, fresh=0)


def _experts_back(own: Share, pieces: Pieces) -> Iterator[Moment]:
    z, moe, mesh = _Sizes.of(own, pieces), own.config.model.moe, own.config.mesh
    base = z.small + z.arrive + z.weighed + z.hidden
    grad = z.wide_token if own.compute < own.wide else given(own, "E")
    made, dx, reads = 0, 0, False
    if moe.num_shared:
        largest = gradient_bytes(own, "E", "shared.w1")
        for moment in one_at_a_time(_shared_back(z, pieces), largest):
            yield moment.more(base + grad)
        shared = ("shared.w1", "shared.w2", "shared.w3", "shared.gate")
        made, dx, reads = gradient_bytes(own, "E", *shared), z.token, own.tp == 1
    base += dx
    narrowed = z.token if own.compute < own.wide and not z.fused else 0
    if not z.arrive:
        yield Moment("rows out", base + grad + narrowed + z.slots, made, reads)
    elif z.here:
        wide = z.arrive // own.compute * own.wide
        yield Moment("rows out", base + grad + narrowed + z.leave, made, reads)
        yield Moment("rows sent", base + z.leave + z.arrive, made, reads)
        copied = z.slots + (0 if z.fused else z.arrive)
        yield Moment("copies out", base + wide + max(z.arrive, copied), made, reads)
    else:
        wide = z.leave // own.compute * own.wide
        yield Moment("weighted rows", base + grad + (z.leave if z.fused else 2 * wide), made, reads)
        base -= z.weighed
        yield Moment("rows sent", base + z.leave + z.arrive, made, reads)
        yield Moment("copies out", base + z.arrive + z.slots, made, reads)
    reads = reads or not z.arrive
    if "expert_gemm" in pieces:
        yield Moment("into experts again", base + 2 * z.slots + z.units, made, reads)
    base += z.units - z.hidden
    w2, w1 = gradient_bytes(own, "E", "w2"), gradient_bytes(own, "E", "w1")
    into = w1 * (2 if moe.activation == "swiglu" else 1)
    # A single process widens each of them when it is whole.
    casts = not own.parallel and own.compute < own.wide
    narrow = own.compute if casts else 0
    found = base + z.slots + z.unit + z.units
    yield Moment("hidden units", found + _blocks(own, z, forward=False), made, reads)
    w2_made = made if casts else made + w2
    fresh = 0 if casts else w2
    yield Moment("gradient of w2", found + w2 // own.wide * narrow, w2_made, reads, fresh)
    made += w2
    base -= z.units
    if casts:
        narrowed = base + z.units + w2 // own.wide * narrow
        yield Moment("wide gradient of w2", narrowed, made, reads, w2)
    found = base + z.units + z.slots + into // own.wide * narrow
    fresh = 0 if casts else into
    made += fresh
    yield Moment("gradient of w1", found, made, reads, fresh)
    if moe.activation == "swiglu":
        yield Moment("gradient of slots", found + z.slots, made, reads, fresh)
    each = columns(moe) if not z.arrive else min(columns(moe), moe.num_experts // mesh.ep)
    if z.arrive and not z.here:
        each = 1
    rows = z.arrive or z.token
    found += rows // z.row * each * own.wide if z.here else 0  # gradients of weights
    yield Moment("gradient of rows", found + z.sum_of(rows, each), made, reads, fresh)
    if casts:
        both, last = base + rows + into // own.wide * narrow, base + rows + w1 // own.wide * narrow
        yield Moment("first wide gradient of w1", both, made + w1, reads, w1)
        yield Moment("wide gradient of w1", last, made + into, reads, w1)
        made += into
    base -= z.arrive
    if z.arrive:
        yield Moment("rows sent back", base + z.arrive + z.leave, made, reads)
        yield Moment("sum of rows", base + z.leave + z.sum_of(z.token, columns(moe)), made, reads)
    yield Moment("sum of gradients", base + 2 * z.token, made)
    yield Moment("router", base + z.token + 2 * z.wide_token, made)


def _blocks(own: Share, z: _Sizes, forward: bool) -> int:
    """What is wide and temporary while some rows at a time are worked on."""
    if z.fused:
        return 0
    gated = own.config.model.moe.activation == "swiglu"
    cast = own.compute < own.wide
    if forward:
        copies = (2 if gated else 1) * cast + 1
    else:
        copies = ((3 if gated else 2) * cast) + (4 if gated else 2)
    return -(-z.unit // BLOCKS) // own.compute * own.wide * copies


def _shared_units(own: Share) -> int:
    moe = own.config.model.moe
    return moe.num_shared * moe.shared_hidden_dim // own.tp


def _shared(z: _Sizes, pieces: Pieces) -> Iterator[Moment]:
    """Beside the routed experts' sum."""
    own = z.own
    moe, x = own.config.model.moe, own.tokens * own.config.model.dim * own.compute
    gathered = x if own.tp > 1 else 0
    for moment in gated_forward(own, _shared_units(own), True, own.tokens):
        yield moment.more(gathered)
    kept = z.shared + (gathered if "block" in pieces else 0)
    if moe.shared_gate:
        yield Moment("gated shared expert", kept + 2 * x)
    if own.tp > 1:
        yield Moment("scatter shared expert", kept + x + x // own.tp)


def _shared_back(z: _Sizes, pieces: Pieces) -> Iterator[Moment]:
    own = z.own
    moe, s, D = own.config.model.moe, own.compute, own.config.model.dim
    x, t = own.tokens * D * s, own.stream * D * s
    unit = own.tokens * _shared_units(own) * s
    gathered = x if own.tp > 1 else 0
    dy = x if s < own.wide or own.tp > 1 else given(own, "E")
    kept = z.shared
    gradients = [gradient_bytes(own, "E", f"shared.{w}") for w in ("w2", "w1")]
    again = "mlp" in pieces
    if own.tp > 1:
        yield Moment("gather shared gradient", kept + t * (s < own.wide) + x, reads=False)
    gate = 0
    if moe.shared_gate:
        yield Moment("gated shared expert", kept + dy + 2 * x, reads=False)
        dy, gate = x, x + gradient_bytes(own, "E", "shared.gate")
    for moment in gated_backward(own, unit, True, dy, gradients[0], asked=again):
        yield moment.more(gathered + gate)
    made = sum(gradients)
    yield Moment("into shared units", gathered + gate + 2 * unit + x, made)
    made += gradients[1]
    yield Moment("sum of shared gradients", (3 + 2 * moe.shared_gate) * x, made)
    if own.tp > 1:
        yield Moment("scatter shared gradient", x + t, made)
