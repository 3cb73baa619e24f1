"""Rows to the ranks that hold their experts, and back: by copy, by token, to all, or in slots.

    copies   one row per chosen expert; weighed and summed where the token is
    tokens   one row per rank that holds a chosen expert; weighed and summed there, in fp32, so
             that one row comes back; the token's rank sums over ranks
    all      every token goes to every rank, chosen or not; weighed and summed there as by token:
             equal splits, nothing counted, no token dropped
    slots    every expert takes a fixed number of rows of every rank: equal splits, nothing counted

A choice of a null expert (id E) goes nowhere. Every `send_*` returns what the experts of this rank
want (the rows that came, and the slots that hold copies of them) and the counts of rows by rank,
whose `back` returns the tokens' outputs. Rows travel in the dtype of the tokens, gate weights in
fp32 (or fp64). Against one process in bf16, `tokens` and `all` round once more: each rank's partial
sum of a token, and each rank's part of its gradient, to 2^-9 of that part; the others round nothing
more.

For the backward the experts' rank keeps the rows that came; the token's rank keeps those that came
back where it weighs them (`copies`, `slots`), for the gradient of the weights.

The sizes of `copies` and `tokens` depend on what the routers chose. The ranks tell each other how
much comes in one small all-to-all, and the host waits for the figures once: splits and groups
follow from them without waiting again. `EvenRouting` chooses for the routers, so that the host
knows all sizes and nothing waits.

Legend: T tokens, K experts of a token, E experts of all ranks, e experts of a rank, W ranks, D
model, R rows that arrive, S slots (rows in order of destination or expert), L labels of a row: the
most experts that it can want of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.blocks.experts.module import Arrived
from megacpp.kernels.experts.copies import gather_rows, group_rows_of_sizes, spread_rows
from megacpp.kernels.experts.rows import Groups, group_rows, sum_rows
from megacpp.kernels.experts.without_slot import group_rows_to_capacity
from megacpp.torch_extras import listed
from parallel.all_to_all import send_rows, send_rows_plain
from parallel.collectives import gather_plain
from parallel.expert.beside import Made, Work, send_rows_beside
from parallel.expert.even_routing import EvenRouting


@dataclass(frozen=True)
class Owners:
    """Owners of experts: rank r of the group has experts [r * each, (r + 1) * each).

    Attributes:
        num_experts: of the layer.
        group: the expert ranks.
        backend: kernels that move rows within a rank, one of `experts`.
    """

    num_experts: int
    group: dist.ProcessGroup
    backend: str = "torch"

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.group.size()

    @property
    def each(self) -> int:
        """Experts of a rank."""
        assert self.num_experts % self.ranks == 0, f"{self.num_experts} experts, {self.ranks} ranks"
        return self.num_experts // self.ranks


@dataclass(frozen=True)
class Copies:
    """Counts by rank when one row per chosen expert is sent."""

    owners: Owners
    leaving: list[int]  # rows to each rank
    arriving: list[int]  # rows from each rank
    at_source: Groups
    at_experts: Groups

    def back(self, rows_SD: Tensor, weights_TK: Tensor, work: Work[Made]) -> tuple[Tensor, Made]:
        """Return outputs of this rank's tokens, `[T, D]` in fp32 (or fp64), and `work()`.

        Args:
            rows_SD: rows of this rank's experts.
            weights_TK: of the tokens' experts.
            work: runs while the rows travel.
        """
        rows_RD, group = rows_SD.index_select(0, self.at_experts.slot_KT[0]), self.owners.group
        rows_SD, made = send_rows_beside(rows_RD, self.arriving, self.leaving, group, work)
        return gather_rows(rows_SD, weights_TK, self.at_source), made


@dataclass(frozen=True)
class Tokens:
    """Counts by rank when one row per rank that holds a chosen expert is sent."""

    owners: Owners
    leaving: list[int]
    arriving: list[int]
    at_source: Groups
    at_experts: Groups

    def back(self, rows_SD: Tensor, weights_TK: Tensor, work: Work[Made]) -> tuple[Tensor, Made]:
        """Return outputs (`Copies.back`) from rows that are weighed."""
        part_RD, group = sum_rows(rows_SD, self.at_experts).to(rows_SD.dtype), self.owners.group
        part_SD, made = send_rows_beside(part_RD, self.arriving, self.leaving, group, work)
        return sum_rows(part_SD, self.at_source), made


@dataclass(frozen=True)
class Slots:
    """Counts when a fixed number of rows is sent for every expert."""

    owners: Owners
    at_source: Groups
    at_experts: Groups

    def back(self, rows_SD: Tensor, weights_TK: Tensor, work: Work[Made]) -> tuple[Tensor, Made]:
        """Return outputs (`Copies.back`); a dropped copy adds nothing."""
        each = [len(rows_SD) // self.owners.ranks] * self.owners.ranks
        rows_RD = rows_SD.index_select(0, self.at_experts.slot_KT[0])
        rows_SD, made = send_rows_beside(rows_RD, each, each, self.owners.group, work)
        return gather_rows(rows_SD, weights_TK, self.at_source), made


@dataclass(frozen=True)
class Everywhere:
    """Groups when every token is sent to every rank."""

    owners: Owners
    at_experts: Groups

    def back(self, rows_SD: Tensor, weights_TK: Tensor, work: Work[Made]) -> tuple[Tensor, Made]:
        """Return outputs (`Copies.back`) from rows that are weighed."""
        part_RD, ranks = sum_rows(rows_SD, self.at_experts).to(rows_SD.dtype), self.owners.ranks
        each = [len(part_RD) // ranks] * ranks
        part_RD, made = send_rows_beside(part_RD, each, each, self.owners.group, work)
        return part_RD.view(ranks, each[0], -1).sum(0, dtype=weights_TK.dtype), made


DispatchCounts = Copies | Tokens | Slots | Everywhere


def send_copies(
    x_TD: Tensor, indices_TK: Tensor, owners: Owners, multiple: int, even: EvenRouting | None
) -> tuple[Arrived, Copies]:
    """Send one row per chosen expert; return the arrived rows and the way back.

    Args:
        x_TD: tokens of this rank.
        indices_TK: their experts.
        owners: of the experts.
        multiple: groups of rows are padded to a multiple of it.
        even: routing whose counts every rank knows; None: ranks exchange counts and wait.
    """
    E, W, e = owners.num_experts, owners.ranks, owners.each
    counts_We = _count(indices_TK, E + 1)[:E].view(W, e)
    if even is None:
        to_We, from_We = _agree(counts_We, owners)
    else:
        _announce(counts_We, owners)
        to_We, from_We = even.copies(len(x_TD), W, owners.group.rank())
    leaving, arriving = [sum(n) for n in to_We], [sum(n) for n in from_We]
    at_source = group_rows_of_sizes(indices_TK, [n for of_rank in to_We for n in of_rank])
    at_source = at_source.by(owners.backend)
    rows_RD = send_rows(spread_rows(x_TD, at_source), leaving, arriving, owners.group)
    # They arrive by rank, and by expert within a rank.
    expert_R = torch.arange(e, device=x_TD.device).repeat(W)
    sizes_R = listed([n for of_rank in from_We for n in of_rank], x_TD.device)
    expert_R = expert_R.repeat_interleave(sizes_R, output_size=len(rows_RD))
    at_experts = group_rows_of_sizes(expert_R[:, None], _columns(from_We), multiple)
    at_experts = at_experts.by(owners.backend)
    counts = Copies(owners, leaving, arriving, at_source, at_experts)
    return Arrived(rows_RD, at_experts), counts


def send_tokens(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    owners: Owners,
    multiple: int,
    even: EvenRouting | None,
) -> tuple[Arrived, Tokens]:
    """Send one row per rank that holds a chosen expert, with ids and weights of its experts.

    Args:
        x_TD: tokens of this rank.
        indices_TK: their experts.
        weights_TK: weights of these.
        owners: of the experts.
        multiple: groups of rows are padded to a multiple of it.
        even: routing whose counts every rank knows; None: ranks exchange counts and wait.
    """
    W, e = owners.ranks, owners.each
    expert_TK, order_TK = indices_TK.sort(1)  # experts of one rank are neighbours, nulls last
    weights_TK = weights_TK.gather(1, order_TK)
    rank_TK = expert_TK // e
    first_TK = torch.ones_like(rank_TK, dtype=torch.bool)
    first_TK[:, 1:] = rank_TK[:, 1:] != rank_TK[:, :-1]
    to_TK = torch.where(first_TK, rank_TK, W)
    counts_W = _count(to_TK, W + 1)[:W, None]
    counts_E = _count(indices_TK, owners.num_experts + 1)[:-1]
    counts_Wn = torch.cat([counts_W, counts_E.view(W, e)], 1)
    if even is None:
        to_Wn, from_Wn = _agree(counts_Wn, owners)
    else:
        _announce(counts_Wn, owners)
        to_Wn, from_Wn = even.rows(len(x_TD), W, owners.group.rank())
    leaving, arriving = [n[0] for n in to_Wn], [n[0] for n in from_Wn]
    at_source = group_rows_of_sizes(to_TK, leaving).by(owners.backend)
    labels = _label(expert_TK, weights_TK, at_source, e)
    rows_RD = send_rows(spread_rows(x_TD, at_source), leaving, arriving, owners.group)
    weights_RL, expert_RL = send_rows(labels, leaving, arriving, owners.group).chunk(2, 1)
    expert_RL = expert_RL.detach().to(torch.int64)
    at_experts = group_rows_of_sizes(expert_RL, _columns(from_Wn)[1:], multiple)
    at_experts = at_experts.by(owners.backend)
    counts = Tokens(owners, leaving, arriving, at_source, at_experts)
    return Arrived(rows_RD, at_experts, weights_RL), counts


def send_slots(
    x_TD: Tensor, indices_TK: Tensor, owners: Owners, capacity: int
) -> tuple[Arrived, Slots]:
    """Send `capacity` rows to every expert; copies past that are dropped, latest first.

    The host never waits and no shape depends on a value.

    Args:
        x_TD: tokens of this rank.
        indices_TK: their experts.
        owners: of the experts.
        capacity: rows of each rank for each expert.
    """
    at_source = group_rows_to_capacity(indices_TK, owners.num_experts, capacity).by(owners.backend)
    rows_SD = spread_rows(x_TD, at_source)
    each = [len(rows_SD) // owners.ranks] * owners.ranks
    rows_RD = send_rows(rows_SD, each, each, owners.group)
    at_experts = _regrouped(len(rows_RD), owners.ranks, owners.each, x_TD.device).by(owners.backend)
    return Arrived(rows_RD, at_experts), Slots(owners, at_source, at_experts)


def send_everywhere(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    owners: Owners,
    multiple: int,
    expected: Fraction,
    capacity: int | None,
) -> tuple[Arrived, Everywhere]:
    """Send every token to every rank, with its experts and weights; every rank has as many tokens.

    The host never waits and no shape depends on a value. More rows travel than are wanted, and a
    GPU makes room for the most copies that there can be: good for few ranks.

    Args:
        x_TD: tokens of this rank.
        indices_TK: their experts.
        weights_TK: weights of these.
        owners: of the experts.
        multiple: groups of rows are padded to a multiple of it.
        expected: experts of a token on one rank, on average.
        capacity: copies that an expert takes for each rank's tokens, the first of all ranks; None:
            every copy.
    """
    e, group = owners.each, owners.group
    labels_T2K = torch.cat([weights_TK, indices_TK.to(weights_TK.dtype)], 1)
    rows_RD, labels_R2K = _ToAll.apply(x_TD, group), _ToAll.apply(labels_T2K, group)
    weights_RK, expert_RK = labels_R2K.chunk(2, 1)  # type: ignore[union-attr]
    expert_RK = expert_RK.detach().to(torch.int64) - group.rank() * e
    expert_RK = torch.where((expert_RK >= 0) & (expert_RK < e), expert_RK, e)
    if capacity is None:
        at_experts = group_rows(expert_RK, e, multiple, expected)
    else:
        at_experts = group_rows_to_capacity(expert_RK, e, capacity * owners.ranks)
    at_experts = at_experts.by(owners.backend)
    return Arrived(rows_RD, at_experts, weights_RK), Everywhere(owners, at_experts)  # type: ignore[arg-type]


class _ToAll(torch.autograd.Function):
    """Rows `[T, D]` of all ranks on each of them, `[R, D]`; the backward sums in at least fp32."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_plain(x_TD, 0, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_RD,) = grads
        ranks = ctx.group.size()
        each = [len(grad_RD) // ranks] * ranks
        back_RD = send_rows_plain(grad_RD, each, each, ctx.group)
        return back_RD.view(ranks, each[0], -1).sum(0), None


def _regrouped(rows: int, outer: int, inner: int, device: torch.device) -> Groups:
    """Slots of rows that lie in equal groups by `outer`, then `inner`: by `inner`, then `outer`."""
    place_R = torch.arange(rows, device=device)
    row_S, slot_R = (
        place_R.view(a, b, -1).transpose(0, 1).flatten()
        for a, b in ((outer, inner), (inner, outer))
    )
    return Groups(slot_R[None], row_S, None)


def _label(expert_TK: Tensor, weights_TK: Tensor, groups: Groups, each: int) -> Tensor:
    """Return weights and local ids of the experts that each leaving row wants, `[S, 2L]`.

    Experts of a token are sorted, so those of a rank follow the copy that stands for the row. The
    ids are exact as floating numbers and so travel with the weights; a place without an expert has
    the id `each` and weight 0.
    """
    T, K = expert_TK.shape
    L, device = min(K, each), expert_TK.device
    copy_N, slot_KT = torch.arange(T * K, device=device), groups.slot_KT
    if groups.kept_KT is not None:  # the others write past the end
        slot_KT = torch.where(groups.kept_KT, slot_KT, len(groups.token_S))
    copy_S = copy_N.new_zeros(len(groups.token_S) + 1)
    copy_S = copy_S.scatter_(0, slot_KT.T.flatten(), copy_N)[:-1]
    place_SL = (copy_S % K)[:, None] + torch.arange(L, device=device)
    copy_SL = (copy_S[:, None] // K) * K + place_SL.clamp(max=K - 1)
    expert_SL = expert_TK.flatten()[copy_SL]
    here_SL = (place_SL < K) & (expert_SL // each == expert_SL[:, :1] // each)
    weights_SL = torch.where(here_SL, weights_TK.flatten()[copy_SL], 0.0)
    ids_SL = torch.where(here_SL, expert_SL % each, each)
    return torch.cat([weights_SL, ids_SL.to(weights_SL.dtype)], 1)


def _count(ids: Tensor, kinds: int) -> Tensor:
    """Return int64 `[kinds]`: how often each id occurs."""
    ids_N = ids.flatten()
    return ids_N.new_zeros(kinds).scatter_add_(0, ids_N, torch.ones_like(ids_N))


def _announce(counts_Wn: Tensor, owners: Owners) -> Tensor:
    """Send row w to rank w; return the rows that the ranks send to this one."""
    each = [counts_Wn.shape[1]] * owners.ranks
    arrived_N = send_rows_plain(counts_Wn.flatten(), each, each, owners.group)
    return arrived_N.view_as(counts_Wn)


def _agree(counts_Wn: Tensor, owners: Owners) -> tuple[list[list[int]], list[list[int]]]:
    """Return the counts for other ranks and theirs for this one, on the host: the one wait."""
    to_Wn, from_Wn = torch.stack([counts_Wn, _announce(counts_Wn, owners)]).tolist()
    return to_Wn, from_Wn


def _columns(table: list[list[int]]) -> list[int]:
    """Sum of each column."""
    return [sum(column) for column in zip(*table, strict=True)]
