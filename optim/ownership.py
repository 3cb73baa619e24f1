"""Whole matrices from sharded parameters: who orthogonalises what, and the two exchanges around it.

FSDP2 cuts parameters into rows, but a matrix must be orthogonalised whole. Every rank derives the
same plan from shapes alone: each matrix that lies on several ranks gets one owner, the costliest
first to the rank with the least work (LPT); one all-to-all brings the rows of the updates to the
owners and one brings the results back. Matrices that lie on one rank stay there.

Legend: R rows and C columns of one matrix, K matrices of an item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.dtensor import is_dtensor
from optim.newton_schulz import newton_schulz_flops


@dataclass(frozen=True)
class MatrixView:
    """How a parameter is read as matrices.

    Attributes:
        row_blocks: heights of the blocks of rows that are matrices of their own, top to bottom
            (a fused projection); empty: the whole parameter is one matrix.
        batched: `[E, R, C]` holds E matrices, one per expert.
    """

    row_blocks: tuple[int, ...] = ()
    batched: bool = False

    def heights(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Rows of each matrix of a parameter of `shape`, seen as `[all rows, C]`."""
        if self.batched:
            assert len(shape) == 3 and not self.row_blocks, f"{self} of {tuple(shape)}"
            return (shape[1],) * shape[0]
        assert len(shape) == 2, f"Muon is for matrices, not for {tuple(shape)}"
        assert sum(self.row_blocks or shape[:1]) == shape[0], f"{self} of {tuple(shape)}"
        return self.row_blocks or (shape[0],)

    def __str__(self) -> str:
        if self.batched:
            return "each expert"
        runs = [(len(list(same)), height) for height, same in groupby(self.row_blocks)]
        blocks = " | ".join(
            f"{count} x {height}" if count > 1 else str(height) for count, height in runs
        )
        return f"rows {blocks}" if blocks else "whole"


@dataclass(frozen=True)
class Layout:
    """Where the rows of a parameter `[all rows, C]` live."""

    bounds: tuple[tuple[int, int], ...]  # per rank of `group`, first row and one past the last
    rank: int = 0  # this process in `group`
    group: dist.ProcessGroup | None = None  # None: all rows are here


@dataclass(frozen=True)
class Item:
    """Consecutive matrices of one height in one parameter that lie on the same ranks."""

    parameter: int
    start: int  # first row in the parameter
    count: int
    rows: int  # of one matrix
    cols: int
    holders: tuple[int, int]  # first rank with a row of it, and last
    owner: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.rows

    @property
    def moves(self) -> bool:
        """No rank has all of it."""
        return self.holders[0] != self.holders[1]

    @property
    def cost(self) -> int:
        return self.count * newton_schulz_flops(self.rows, self.cols)


def layout_of(parameter: Tensor) -> Layout:
    """Row bounds of a plain tensor, or of a DTensor sharded on dim 0 of one mesh axis.

    Other mesh axes must replicate: each replica then does the same work and gets the same bits.
    """
    rows = parameter.shape[0]
    per_row = parameter.shape[1] if parameter.dim() == 3 else 1
    if not is_dtensor(parameter):
        return Layout(((0, rows * per_row),))
    from torch.distributed.tensor import Shard

    mesh, placements = parameter.device_mesh, parameter.placements
    cuts = [i for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1]
    if not cuts:
        return Layout(((0, rows * per_row),))
    placement = placements[cuts[0]]
    assert len(cuts) == 1 and type(placement) is Shard and placement.dim == 0, (
        f"Muon needs parameters sharded on dim 0 of one mesh axis, not {placements}"
    )
    size, rank = mesh.size(cuts[0]), mesh.get_local_rank(cuts[0])
    most = -(-rows // size)  # as torch.chunk cuts: equal, then one shorter, then none
    cut = [min(rows, r * most) * per_row for r in range(size + 1)]
    bounds = tuple(pairwise(cut))
    local = parameter.to_local()
    assert len(local) * per_row == bounds[rank][1] - bounds[rank][0], f"{local.shape} of {bounds}"
    return Layout(bounds, rank, mesh.get_group(cuts[0]))


def items_of(
    parameter: int, heights: Sequence[int], cols: int, bounds: Sequence[tuple[int, int]]
) -> list[Item]:
    """The matrices of one parameter, runs of alike ones together; the first holder owns them."""
    items: list[Item] = []
    start = 0
    for height in heights:
        on = [r for r, (low, high) in enumerate(bounds) if low < start + height and start < high]
        holders = on[0], on[-1]
        last = items[-1] if items else None
        if last is not None and (last.rows, last.holders) == (height, holders):
            items[-1] = replace(last, count=last.count + 1)
        else:
            items.append(Item(parameter, start, 1, height, cols, holders, on[0]))
        start += height
    return items


def choose_owners(items: Sequence[Item], ranks: int) -> list[Item]:
    """The same items, those on several ranks with an owner each: longest processing time first.

    Work that can't move (matrices on one rank) counts as load from the start.
    """
    load = [0] * ranks
    for item in items:
        if not item.moves:
            load[item.owner] += item.cost
    owners: dict[int, int] = {}
    order = sorted(range(len(items)), key=lambda i: (-items[i].cost, i))
    for i in order:
        if items[i].moves:
            owners[i] = min(range(ranks), key=lambda r: (load[r], r))
            load[owners[i]] += items[i].cost
    return [replace(item, owner=owners.get(i, item.owner)) for i, item in enumerate(items)]


@dataclass(frozen=True)
class Piece:
    """Rows `[low, high)`, counted in the whole parameter, that one rank holds of an item."""

    item: Item
    low: int
    high: int

    @property
    def size(self) -> int:
        return (self.high - self.low) * self.item.cols


Solve = Callable[[list[Tensor]], list[Tensor]]


class Ownership:
    """The plan of one process group: the work of every rank, and the way there and back."""

    def __init__(self, items: Sequence[Item], layouts: dict[int, Layout]) -> None:
        """`layouts` of the parameters by number, all of one group."""
        some = next(iter(layouts.values()))
        self.rank, self.ranks, self.group = some.rank, len(some.bounds), some.group
        assert self.group is None or dist.get_rank(self.group) == self.rank
        self.layouts = layouts
        self.items = choose_owners(items, self.ranks)
        self.staying = [i for i in self.items if not i.moves and i.owner == self.rank]
        moving = [item for item in self.items if item.moves]
        self.mine = [item for item in moving if item.owner == self.rank]
        # My rows of the matrices of each owner, and each rank's rows of the matrices I own.
        self.sent = [
            self._pieces([item for item in moving if item.owner == owner], self.rank)
            for owner in range(self.ranks)
        ]
        self.received = [self._pieces(self.mine, r) for r in range(self.ranks)]
        self.exchanges = bool(moving)

    def solve(
        self, local: dict[int, Tensor], function: Solve
    ) -> Iterator[tuple[Item, slice, Tensor]]:
        """Applies `function` to whole matrices; yields results for the rows that are here.

        Args:
            local: this rank's rows `[local rows, C]` of each parameter, all of one dtype.
            function: stacks `[K, R, C]` to stacks of the same shapes and dtype, each matrix for
                itself.

        Yields:
            An item, rows of its parameter's local part, and the result for them: `[K, R, C]` where
            whole matrices are here, else `[rows, C]`.
        """
        empty = next(iter(local.values())).new_empty(0)
        here = [self._here(Piece(item, item.start, item.stop)) for item in self.staying]
        stacks = [
            local[item.parameter][rows].view(item.count, item.rows, item.cols)
            for item, rows in zip(self.staying, here, strict=True)
        ]
        if self.exchanges:
            stacks += self._gather(local, empty)
        done = function(stacks)
        yield from zip(self.staying, here, done[: len(here)], strict=True)
        if self.exchanges:
            yield from self._give_back(done[len(here) :], empty)

    def _gather(self, local: dict[int, Tensor], empty: Tensor) -> list[Tensor]:
        """The moving matrices that this rank owns, whole: one all-to-all."""
        rows = [
            local[piece.item.parameter][self._here(piece)].flatten()
            for pieces in self.sent
            for piece in pieces
        ]
        arrived = self._all_to_all(rows, self.sent, self.received, empty)
        parts: dict[Item, list[Tensor]] = {item: [] for item in self.mine}
        for piece, part in arrived:  # by rank, and so by row
            parts[piece.item].append(part)
        return [torch.cat(parts[i]).view(i.count, i.rows, i.cols) for i in self.mine]

    def _give_back(
        self, done: Sequence[Tensor], empty: Tensor
    ) -> Iterator[tuple[Item, slice, Tensor]]:
        """Results of the moving matrices for the rows of this rank: the other all-to-all."""
        whole = {i: x_KRC.reshape(-1, i.cols) for i, x_KRC in zip(self.mine, done, strict=True)}
        rows = [
            whole[piece.item][
                piece.low - piece.item.start : piece.high - piece.item.start
            ].flatten()
            for pieces in self.received
            for piece in pieces
        ]
        for piece, part in self._all_to_all(rows, self.received, self.sent, empty):
            yield piece.item, self._here(piece), part.view(-1, piece.item.cols)

    def _all_to_all(
        self,
        rows: list[Tensor],
        leaving: Sequence[Sequence[Piece]],
        arriving: Sequence[Sequence[Piece]],
        empty: Tensor,
    ) -> Iterator[tuple[Piece, Tensor]]:
        """Sends flat `rows`, the pieces of `leaving` in order; yields the pieces of `arriving`."""
        there = [sum(piece.size for piece in pieces) for pieces in leaving]
        back = [sum(piece.size for piece in pieces) for pieces in arriving]
        arrived = empty.new_empty(sum(back))
        dist.all_to_all_single(arrived, torch.cat(rows or [empty]), back, there, self.group)
        pieces = [piece for pieces in arriving for piece in pieces]
        yield from zip(pieces, arrived.split([piece.size for piece in pieces]), strict=True)

    def _pieces(self, items: Sequence[Item], rank: int) -> list[Piece]:
        """The rows of `items` that `rank` holds, in order; items without any are left out."""
        pieces = []
        for item in items:
            first, past = self.layouts[item.parameter].bounds[rank]
            low, high = max(first, item.start), min(past, item.stop)
            if low < high:
                pieces.append(Piece(item, low, high))
        return pieces

    def _here(self, piece: Piece) -> slice:
        """Rows of a piece in this rank's part of the parameter."""
        first = self.layouts[piece.item.parameter].bounds[self.rank][0]
        return slice(piece.low - first, piece.high - first)
