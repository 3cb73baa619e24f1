"""Groups of rows in which some copies of tokens have no slot: of null experts, or past a capacity.

Legend: as megacpp/kernels/experts/rows.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.kernels.experts.rows import Groups, padded_slots, slots_of, sort_copies, unsort


def group_owned(expert_TK: Tensor, num_experts: int, multiple: int) -> Groups:
    """Return groups of copies some of which are of no expert (`num_experts`).

    Slots past the groups are of none either. A token chooses an expert once, so it has no more
    copies than there are experts.
    """
    sorted_N, order_N, slot_N, padded_E = padded_slots(expert_TK, num_experts, multiple)
    slots = slots_of(padded_E, len(expert_TK) * min(expert_TK.shape[1], num_experts), multiple)
    counts_X = torch.cat([padded_E, (slots - padded_E.sum()).view(1)])
    return _groups(expert_TK, order_N, slot_N, sorted_N < num_experts, slots, counts_X)


def group_rows_to_capacity(expert_TK: Tensor, num_experts: int, capacity: int) -> Groups:
    """Return groups of exactly `capacity` slots; copies past that are dropped, latest first.

    Shapes are static and the host never waits. A copy for expert `num_experts` has no slot.
    Dropping by token order keeps a causal model causal: no token can lose its place to a later one.
    """
    sorted_N, order_N, first_X = sort_copies(expert_TK, num_experts)
    place_N = torch.arange(len(sorted_N), device=sorted_N.device) - first_X[1:][sorted_N]
    kept_N = (place_N < capacity) & (sorted_N < num_experts)
    slot_N = sorted_N * capacity + place_N
    return _groups(expert_TK, order_N, slot_N, kept_N, num_experts * capacity, None)


def _groups(
    expert_TK: Tensor,
    order_N: Tensor,
    slot_N: Tensor,
    kept_N: Tensor,
    slots: int,
    counts_X: Tensor | None,
) -> Groups:
    """Return the groups of copies in expert order that have a slot where they are kept."""
    token_S = slot_N.new_zeros(slots + 1)  # the last slot takes what has none
    token_S.scatter_(0, torch.where(kept_N, slot_N, slots), order_N // expert_TK.shape[1])
    slot_KT = unsort(torch.where(kept_N, slot_N, 0), order_N, expert_TK)
    return Groups(slot_KT, token_S[:-1], counts_X, unsort(kept_N, order_N, expert_TK))
