"""What E blocks keep for the backward.

Legend: m tokens that this rank routes, D model, E experts, e of a rank, W ranks of the axis ep, K
experts of a token at most, N = m K copies, of which m top_k have an expert on average and the rest
are nulls, I hidden of an expert, Z rows that leave for other ranks, R that arrive, S slots of this
rank's experts (padded groups of copies), L experts that a row can want of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megacpp.blocks.attention.choices import circle, columns, null_copies, visited_ranks
from megacpp.memory.forms.activation_blocks import hidden_product
from megacpp.memory.forms.activation_share import INDEX, Kept, Pieces, Share
from megacpp.model.regions import BLOCK

ROWS, GPU_ROWS = 48, 16  # a group is padded to a multiple (kernels/grouped_mm.py)


@dataclass(frozen=True)
class Trip:
    """Rows of a rank: that leave, that arrive, copies of those that arrived, slots for them."""

    leaving: int
    arriving: int
    copies: int
    slots: int


def experts(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """Routing, rows, hidden units of the routed experts, and the shared expert."""
    moe, m, whole = own.config.model.moe, own.stream, pieces >= BLOCK
    losses = moe.balance_loss or moe.sequence_loss
    yield "routing", m * columns(moe), INDEX
    if whole and losses:
        yield "routing", m * moe.top_k, INDEX  # what plain top-k chooses is a decision too
    if moe.balance_loss:
        yield "routing", moe.num_experts, own.wide
    if not whole:
        yield from _router(own)
    trip = trip_of(own)
    yield from _places(own, trip)
    if not whole:
        yield from _rows(own, trip)
        if "expert_gemm" not in pieces:
            hidden = moe.hidden_dim * (2 if moe.activation == "swiglu" else 1)
            yield "hidden units", trip.slots * hidden, own.compute
        yield from _shared(own, pieces)


def _router(own: Share) -> Iterator[Kept]:
    """Scores, and what the auxiliary losses read."""
    moe, m, wide = own.config.model.moe, own.stream, own.wide
    E, K, sigmoid = moe.num_experts, columns(moe), moe.score == "sigmoid"
    if null_copies(moe) and not sigmoid:
        yield "routing", m * K, 1  # which are nulls
    if not sigmoid and moe.softmax_order == "pre":
        yield "routing", m * E, wide
    else:
        yield "routing", m * (K + sigmoid), wide
    if moe.balance_loss or moe.sequence_loss:
        yield "routing", m * (E + sigmoid), wide
    if moe.sequence_loss:
        yield "routing", m * E, wide  # how much of its document chose each expert
    if moe.z_loss:
        yield "routing", m * (E + 1), wide


def trip_of(own: Share) -> Trip:
    """Sizes of what is sent and computed; dropless: with even choices, or the most there can be."""
    moe, m = own.config.model.moe, own.stream
    E, K, W = moe.num_experts, columns(moe), own.config.mesh.ep
    N, e, rows = m * moe.top_k, E // W, GPU_ROWS if own.on_gpu else ROWS
    if moe.capacity_factor is not None:
        slots = E * math.ceil(N / E * moe.capacity_factor)
        return Trip(slots, slots, slots, slots)
    if own.most:
        copies = W * m * min(K, e)
        arriving = W * m if own.config.mesh.ep_dispatch == "per_rank" else copies
        per_rank = own.config.mesh.ep_dispatch == "per_rank"
        leaving = m * (visited_ranks(moe, W) if per_rank else K)
        return Trip(leaving, arriving, copies, copies + min(e, copies) * (rows - 1))
    order = circle(E, moe.num_groups, moe.top_k_groups) if W > 1 else tuple(range(E - 1, -1, -1))
    counts = [N // E] * E
    for expert in order[: N % E]:
        counts[expert] += 1
    mine = [W * n for n in counts[own.expert * e : (own.expert + 1) * e]]
    slots, copies = sum(-(-n // rows) * rows for n in mine), sum(mine)
    if W == 1 and own.on_gpu:  # which doesn't wait for the counts: as many as there can be
        slots = (m * K + min(E, m * K) * (rows - 1)) // rows * rows
    if own.config.mesh.ep_dispatch == "per_expert" or W == 1:
        return Trip(N, copies, copies, slots)
    sent = _sent(m, moe.top_k, e, order)
    return Trip(sum(sent), W * sent[own.expert], copies, slots)


@lru_cache(maxsize=64)
def _sent(m: int, K: int, e: int, order: Sequence[int]) -> Sequence[int]:
    """Rows to each rank: one per token and rank that holds some of its K neighbours."""
    E = len(order)
    counts, period = [0] * (E // e), E // math.gcd(E, K)
    for t in range(min(period, m)):
        for rank in {order[(t * K + k) % E] // e for k in range(K)}:
            counts[rank] += (m - t - 1) // period + 1
    return tuple(counts)


def _places(own: Share, trip: Trip) -> Iterator[Kept]:
    """Where copies lie: the slot of each, the row in each slot, which ones have one."""
    moe, mesh = own.config.model.moe, own.config.mesh
    N, L = own.stream * columns(moe), min(columns(moe), moe.num_experts // mesh.ep)
    nulls = null_copies(moe) > 0
    yield "rows", N, INDEX
    if moe.capacity_factor is not None:
        yield "rows", N, 1
        yield "rows", trip.slots + 1, INDEX
        if mesh.ep > 1:  # both orders; of one expert they are the same
            yield "rows", trip.slots * (2 if moe.num_experts > mesh.ep else 1), INDEX
        return
    if mesh.ep == 1:
        yield "rows", trip.slots + nulls, INDEX
        yield "rows", moe.num_experts + nulls, INDEX
        yield "rows", N * nulls, 1
        return
    yield "rows", trip.slots, INDEX
    yield "rows", trip.leaving, INDEX
    labels = trip.arriving * (L if mesh.ep_dispatch == "per_rank" else 1)
    yield "rows", labels, INDEX
    if trip.leaving < N:
        yield "rows", N, 1
    if trip.copies < labels:
        yield "rows", labels, 1


def _rows(own: Share, trip: Trip) -> Iterator[Kept]:
    """Weights of copies, and rows that other ranks sent."""
    moe, mesh, D = own.config.model.moe, own.config.mesh, own.config.model.dim
    N, L = own.stream * columns(moe), min(columns(moe), moe.num_experts // mesh.ep)
    if mesh.ep > 1:
        yield "rows", trip.arriving * D, own.compute
    if mesh.ep == 1 or (moe.capacity_factor is None and mesh.ep_dispatch == "per_rank"):
        yield "rows", trip.slots + 1, own.wide  # weighed where the experts are
    else:
        yield "rows", N, own.wide
        yield "rows", trip.leaving * D, own.compute  # as they came back, to be weighed
    if mesh.ep > 1 and moe.capacity_factor is None and mesh.ep_dispatch == "per_rank":
        yield "routing", N, INDEX + own.wide
        yield "rows", trip.leaving * L, INDEX + 1


def _shared(own: Share, pieces: Pieces) -> Iterator[Kept]:
    """The shared expert, which every token visits."""
    moe, n, s = own.config.model.moe, own.tokens, own.compute
    if not moe.num_shared:
        return
    if own.tp > 1:
        yield "normed", n * own.config.model.dim, s
    if "mlp" not in pieces:
        yield "hidden units", n * 2 * (moe.num_shared * moe.shared_hidden_dim // own.tp), s
    yield from hidden_product(own, "E", moe.num_shared * moe.shared_hidden_dim // own.tp, pieces)
    if moe.shared_gate:
        yield "hidden units", n * (own.config.model.dim + 1), s
