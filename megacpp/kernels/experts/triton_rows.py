"""Rows to the slots of their experts, by Triton kernels without a sort.

    count       copies of each expert, of each program's part of the tokens
    place       slot of every copy, token of every slot, slots of each expert
    weigh       weight of every slot

One launch each. Copies keep their token order within an expert, as those of a stable sort; no
addition is atomic.

Legend: T tokens, K experts of a token, E experts, N = T * K copies, S slots, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.experts.sizes import most_slots
from megacpp.kernels.graph_operator import graph_operator
from megacpp.kernels.strides import launch

PROGRAMS = 512  # at most: each reads what all have counted
TILE = 2048  # copies times experts at a time: 8 numbers for each thread of 8 warps
OPTIONS = {"num_warps": 8, "maxnreg": 128}  # else ptxas leaves registers free, and spills


def group(
    expert_TK: Tensor, num_experts: int, multiple: int, owned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return slots of copies `[K, T]`, tokens of slots `[S]`, slots of experts, copies with a slot.

    S is the most that these shapes can need: the host never waits.

    Args:
        expert_TK: chosen experts; `num_experts`: none.
        num_experts: E.
        multiple: of the slots of each expert.
        owned: some copies may have no expert: the slots of experts end with those of none, and the
            last result is their mask, bool `[K, T]`; else it is None.
    """
    slot_TK, token_S, counts_X, kept_TK = _group(expert_TK, num_experts, multiple, owned)
    return slot_TK.T, token_S, counts_X, kept_TK.T if owned else None


@graph_operator("experts_group")
def _group(
    expert_TK: Tensor, num_experts: int, multiple: int, owned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    expert_TK, (T, K) = expert_TK.contiguous(), expert_TK.shape
    # A token chooses an expert once, so it has no more copies than there are experts.
    slots = most_slots(num_experts, T * (min(K, num_experts) if owned else K), multiple)
    slot_TK, token_S = torch.empty_like(expert_TK), expert_TK.new_empty(slots)
    counts_X = expert_TK.new_empty(num_experts + owned)
    kept_TK = expert_TK.new_empty(expert_TK.shape if owned else 0, dtype=torch.bool)
    shape = _shape(num_experts)
    blocks = -(-T * K // shape["ROWS"])
    programs = max(1, min(PROGRAMS, blocks))
    each = -(-blocks // programs)  # blocks of each program
    part_PE = expert_TK.new_empty(programs, num_experts, dtype=torch.int32)
    _launch(_count_kernel, programs, expert_TK, part_PE, T * K, each, **shape)
    given = expert_TK, part_PE, slot_TK, token_S, counts_X, kept_TK
    sizes = T * K, each, programs, slots
    constants = {"K": K, "MULTIPLE": multiple, "OWNED": owned}
    _launch(_place_kernel, programs, *given, *sizes, **constants, **shape)
    return slot_TK, token_S, counts_X, kept_TK


def weights_of_slots(
    weights_KT: Tensor, slot_KT: Tensor, token_S: Tensor, kept_KT: Tensor | None
) -> Tensor:
    """Return the weight of each slot, `[S]`; 0 of padding.

    Args:
        weights_KT: weight of each copy.
        slot_KT: slot of each copy.
        token_S: token in each slot.
        kept_KT: bool, copies that have a slot; None: all.
    """
    weights_TK, slot_TK = weights_KT.T.contiguous(), slot_KT.T.contiguous()
    w_S = weights_KT.new_empty(len(token_S))
    kept = slot_TK if kept_KT is None else kept_KT.T.contiguous()
    given = slot_TK, token_S, kept, weights_TK, w_S, len(token_S)
    constants = {"K": slot_TK.shape[1], "SOME": kept_KT is not None, "BLOCK": 256}
    _launch(_weigh_kernel, -(-len(token_S) // 256), *given, **constants)
    return w_S


def _launch(kernel: Any, programs: int, *given: Any, **constants: Any) -> None:
    launch(kernel, (programs,), *given, **constants, **OPTIONS)


def _shape(num_experts: int) -> dict[str, int]:
    """Return the constants of a launch; ROWS copies at a time."""
    block = 1 << (num_experts - 1).bit_length()
    return {"E": num_experts, "ROWS": max(1, TILE // block), "BLOCK": block}


@triton.jit
def _count_kernel(
    chosen, parts, copies, each, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for block in range(program * each, (program + 1) * each):
        copy = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        expert = tl.load(chosen + copy, mask=copy < copies, other=E)
        found += tl.sum((expert[:, None] == column[None, :]).to(tl.int32), 0)
    tl.store(parts + program * E + column, found, mask=column < E)


@triton.jit
def _place_kernel(
    chosen, parts, slots, tokens, counts, kept, copies, each, programs, all_slots,
    K: tl.constexpr, MULTIPLE: tl.constexpr, OWNED: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    # Copies of each expert: of all programs, and of those before this one.
    size, before = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, programs, ROWS):
        other = first + tl.arange(0, ROWS)
        inside = (other < programs)[:, None] & (column < E)[None, :]
        part = tl.load(parts + other[:, None] * E + column[None, :], mask=inside, other=0)
        size += tl.sum(part, 0)
        before += tl.sum(tl.where((other < program)[:, None], part, 0), 0)
    padded = (size + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    start = tl.cumsum(padded, 0) - padded
    end = tl.sum(padded, 0)
    place = (start + before).to(tl.int64)
    for block in range(program * each, (program + 1) * each):
        copy = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = copy < copies
        expert = tl.load(chosen + copy, mask=inside, other=E)
        is_it = ((expert[:, None] == column[None, :]) & (expert < E)[:, None]).to(tl.int32)
        rank = tl.cumsum(is_it, 0) - 1
        slot = tl.sum(tl.where(is_it != 0, place[None, :] + rank, 0), 1)
        real = inside
        if OWNED:
            real = inside & (expert < E)
            tl.store(kept + copy, expert < E, mask=inside)
        tl.store(slots + copy, slot, mask=inside)
        tl.store(tokens + slot, copy // K, mask=real)
        place += tl.sum(is_it, 0)
    # Padding, an expert or a block of slots past the last one at a time.
    if program == 0:
        tl.store(counts + column, padded.to(tl.int64), mask=column < E)
        if OWNED:
            tl.store(counts + E, (all_slots - end).to(tl.int64))
        for i in range(MULTIPLE - 1):
            free = start + size + i
            free_slot = free.to(tl.int64)
            zero = tl.zeros([BLOCK], tl.int64)
            tl.store(tokens + free_slot, zero, mask=(column < E) & (free < start + padded))
    for first in range(end + program * ROWS, all_slots, programs * ROWS):
        free_slots = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        tl.store(tokens + free_slots, tl.zeros([ROWS], tl.int64), mask=free_slots < all_slots)


@triton.jit
def _weigh_kernel(
    slots, tokens, kept, weights, out, rows,
    K: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < rows
    copy = tl.load(tokens + slot, mask=inside, other=0) * K
    found = tl.zeros([BLOCK], out.dtype.element_ty)
    for k in range(K):
        mine = inside & (tl.load(slots + copy + k, mask=inside, other=-1) == slot)
        if SOME:  # a copy without a slot has the number 0, which is another's
            mine = mine & (tl.load(kept + copy + k, mask=inside, other=0) != 0)
        found = tl.where(mine, tl.load(weights + copy + k, mask=mine, other=0.0), found)
    tl.store(out + slot, found, mask=inside)
