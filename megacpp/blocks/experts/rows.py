"""Rows of experts on a rank: what is sent, what arrives, what is computed; no torch import.

Legend: m tokens that this rank routes, E experts, e of a rank, W ranks of the axis ep, K experts of
a token at most, N = m K copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import copies_weights
from megacpp.blocks.experts.choices import circle, columns, expert_capacity, visited_ranks
from megacpp.kernels.experts.sizes import CPU_ROWS, GPU_ROWS, block_rows, most_slots

if TYPE_CHECKING:
    from megacpp.memory.forms.local_shapes import LocalShapes


@dataclass(frozen=True)
class ExpertRows:
    """Numbers of rows on a rank.

    Attributes:
        leaving: sent to the ranks of the experts.
        arriving: that other ranks, and this one, send here.
        copies: of those that arrived, one for each expert here that a row wants.
        slots: for the copies, with padding.
        whole: whether all choices leave, and whether arrived rows want as many experts as they can.
    """

    leaving: int
    arriving: int
    copies: int
    slots: int
    whole: tuple[bool, bool] = (True, True)


def pieces_of(own: LocalShapes, rows: int) -> int:
    """Return the products in which an expert's rows are multiplied: one, or several on a CPU.

    Args:
        own: sizes of the rank.
        rows: of an expert.
    """
    return 1 if own.on_gpu else math.ceil(rows / CPU_ROWS)


def expert_rows(own: LocalShapes) -> ExpertRows:
    """Return rows of an E block: dropless, with even choices, or the most that there can be.

    Args:
        own: sizes of the rank.
    """
    moe, m, mesh = own.config.model.moe, own.stream, own.config.mesh
    E, K, W = moe.num_experts, columns(moe), mesh.ep
    N, e, rows = m * moe.top_k, E // W, GPU_ROWS if own.on_gpu else CPU_ROWS
    padded = mesh.ep_dispatch == "padded" and W > 1
    if moe.capacity_factor is not None:
        slots = E * expert_capacity(m, moe)
        travelling = W * m if padded else slots
        return ExpertRows(travelling, travelling, slots, slots)
    per_rank = mesh.ep_dispatch == "per_rank"
    labels = min(K, e) if per_rank else 1  # experts that a row can want
    if padded and (own.most or own.on_gpu):
        copies = W * m * min(K, e)
        return ExpertRows(W * m, W * m, copies, most_slots(e, copies, rows))
    if own.most:
        copies = W * m * min(K, e)
        slots = most_slots(e, copies, rows)
        if not per_rank or W == 1:
            return ExpertRows(m * K, copies, copies, slots, (W > 1, True))
        visits = visited_ranks(moe, W)
        return ExpertRows(m * visits, W * m, copies, slots, (visits == K, False))
    order = circle(E, moe.num_groups, moe.top_k_groups) if W > 1 else tuple(range(E - 1, -1, -1))
    counts = [N // E] * E
    for expert in order[: N % E]:
        counts[expert] += 1
    mine = [W * n for n in counts[own.expert * e : (own.expert + 1) * e]]
    slots, copies = sum(-(-n // rows) * rows for n in mine), sum(mine)
    if W == 1 and own.on_gpu:  # which doesn't wait for the counts: as many as there can be
        slots = most_slots(E, m * K, rows)
    if padded:
        return ExpertRows(W * m, W * m, copies, slots)
    if not per_rank or W == 1:
        return ExpertRows(N, copies, copies, slots, (m * K == N and W > 1, True))
    sent = _sent(m, moe.top_k, e, order)
    leaving, arriving = sum(sent), W * sent[own.expert]
    return ExpertRows(
        leaving, arriving, copies, slots, (leaving == m * K, copies == arriving * labels)
    )


def counts(own: LocalShapes) -> dict[str, int]:
    """Return the numbers that bytes are affine in, by name."""
    found = asdict(expert_rows(own))
    whole = found.pop("whole")
    # Where rows want as many experts as they can, one place is empty: its mask counts as well.
    found["copies"] -= own.most and not whole[1]
    return found | {"block": _block(own) if own.by("experts") == "torch" else 0}


def operators(own: LocalShapes) -> tuple[int, ...]:
    """Return what decides about operators: masks, blocks of hidden units, copies of weights."""
    rows, moe = expert_rows(own), own.config.model.moe
    each = _block(own)
    blocks = -(-rows.slots // each) if own.by("experts") == "torch" else 0
    shared = copies_weights(own, 2, 2 * moe.num_shared * moe.shared_hidden_dim)
    return *map(int, rows.whole), blocks, shared


def _block(own: LocalShapes) -> int:
    return block_rows(expert_rows(own).slots, own.config.model.moe.hidden_dim)


@lru_cache(maxsize=64)
def _sent(m: int, K: int, e: int, order: Sequence[int]) -> Sequence[int]:
    """Rows to each rank: one per token and rank that holds some of its K neighbours."""
    E = len(order)
    counts, period = [0] * (E // e), E // math.gcd(E, K)
    for t in range(min(period, m)):
        for rank in {order[(t * K + k) % E] // e for k in range(K)}:
            counts[rank] += (m - t - 1) // period + 1
    return tuple(counts)


def sends(own: LocalShapes, parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, str, int]]:
    """Yield rows to the experts and back, in both directions, and choices for a document's load.

    Args:
        own: sizes of the rank.
        parts: of the rank, each with whether it is recomputed whole.
    """
    mesh, moe = own.config.mesh, own.config.model.moe
    layers = [again for kind, again in parts if kind[0] == "E"]
    if mesh.ep > 1 and layers:
        trip, walks = expert_rows(own), sum(2 + again for again in layers)
        rows = max(trip.leaving, trip.arriving)
        yield "ep", "rows", walks * 2 * rows * own.config.model.dim * own.compute
        padded, exact = mesh.ep_dispatch == "padded", moe.capacity_factor is None
        if padded or (exact and mesh.ep_dispatch == "per_rank"):
            here = moe.num_experts if padded else moe.num_experts // mesh.ep
            yield "ep", "labels", walks * rows * 2 * min(columns(moe), here) * own.wide
    if moe.sequence_loss and layers and own.tp * own.cp > 1:
        choices = own.stream * moe.top_k * own.tp * own.cp
        yield "row", "choices", sum(1 + again for again in layers) * choices * 2 + own.row * 8
