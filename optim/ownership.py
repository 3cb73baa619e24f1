"""Whole matrices from sharded parameters: who orthogonalises what, and the two exchanges around it.

Meshes cut parameters into boxes (optim/boxes.py), but a matrix must be orthogonalised whole. Every
rank derives the same plan from shapes alone: each matrix that lies on several ranks gets one owner,
the costliest first to the rank with the least work (LPT); one all-to-all brings the cells of the
updates to the owners and one brings the results back. Matrices that lie on one rank stay there.

Costs, of the M cells of all matrices that move among W ranks, in the iteration's dtype: each of the
two exchanges carries M / W cells of a rank, a share, and (W - 1) / W of it to other ranks where
every rank has part of every matrix. At the peak a step stores four shares, the updates themselves
included, or six of matrices so small that Newton-Schulz batches them: measured with an iteration in
the parameters' dtype; in bf16 the updates of fp32 parameters weigh double.

Legend: E matrices of a parameter `[E, R, C]`, R rows and C columns; K matrices of an item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from optim.boxes import Box, Layout
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
        """Rows of each matrix of a parameter of `shape`, in order."""
        if self.batched:
            assert len(shape) == 3 and not self.row_blocks, f"{self} of {tuple(shape)}"
            return (shape[1],) * shape[0]
        assert len(shape) == 2, f"Muon is for matrices, not for {tuple(shape)}"
        assert sum(self.row_blocks or shape[:1]) == shape[0], f"{self} of {tuple(shape)}"
        return self.row_blocks or (shape[0],)

    def matrices(self, shape: Sequence[int]) -> list[Box]:
        """The cells of each matrix of a parameter of `shape`, seen as `[E, R, C]`."""
        heights, cols = self.heights(shape), shape[-1]
        if self.batched:
            return [Box((e, 0, 0), (e + 1, rows, cols)) for e, rows in enumerate(heights)]
        return [Box((0, a, 0), (1, b, cols)) for a, b in pairwise([0, *accumulate(heights)])]

    def __str__(self) -> str:
        if self.batched:
            return "each expert"
        runs = [(len(list(same)), height) for height, same in groupby(self.row_blocks)]
        blocks = " | ".join(
            f"{count} x {height}" if count > 1 else str(height) for count, height in runs
        )
        return f"rows {blocks}" if blocks else "whole"


@dataclass(frozen=True)
class Item:
    """Consecutive matrices of one shape in one parameter that lie on the same ranks."""

    parameter: int
    box: Box  # the matrices together: experts, or rows
    count: int
    rows: int  # of one matrix
    cols: int
    holders: tuple[int, ...]  # ranks with cells of it, in order
    owner: int

    @property
    def moves(self) -> bool:
        """No rank has all of it."""
        return len(self.holders) > 1

    @property
    def cost(self) -> int:
        return self.count * newton_schulz_flops(self.rows, self.cols)


def items_of(parameter: int, matrices: Sequence[Box], boxes: Sequence[Box]) -> list[Item]:
    """The matrices of one parameter, runs of alike ones together; the first holder owns them.

    A run that moves becomes as many items as it has holders, so that they may share the work.
    """

    def holders(matrix: Box) -> tuple[int, ...]:
        return tuple(r for r, box in enumerate(boxes) if box.meet(matrix))

    items: list[Item] = []
    for (shape, on), same in groupby(matrices, lambda matrix: (matrix.shape, holders(matrix))):
        run = list(same)
        most = -(-len(run) // len(on))
        for first in range(0, len(run), most):
            part = run[first : first + most]
            box = Box(part[0].low, part[-1].high)
            items.append(Item(parameter, box, len(part), shape[1], shape[2], on, on[0]))
    return items


def choose_owners(items: Sequence[Item], ranks: int) -> list[Item]:
    """The same items, those on several ranks with an owner each: longest processing time first.

    Work that can't move (matrices on one rank) counts as load from the start. A holder whose load
    stays within the mean is preferred: what it holds of the matrix needs no sending.
    """
    load = [0] * ranks
    for item in items:
        if not item.moves:
            load[item.owner] += item.cost
    mean = -(-sum(item.cost for item in items) // ranks)
    owners: dict[int, int] = {}
    order = sorted(range(len(items)), key=lambda i: (-items[i].cost, i))
    for i in order:
        if items[i].moves:
            cost = items[i].cost
            near = [r for r in items[i].holders if load[r] + cost <= max(mean, cost)]
            owners[i] = min(near or range(ranks), key=lambda r: (load[r], r))
            load[owners[i]] += cost
    return [replace(item, owner=owners.get(i, item.owner)) for i, item in enumerate(items)]


@dataclass(frozen=True)
class Piece:
    """The cells that one rank holds of an item."""

    item: Item
    box: Box


Solve = Callable[[list[Tensor]], list[Tensor]]
Where = tuple[slice, ...]


class Ownership:
    """The plan of one process group: the work of every rank, and the way there and back."""

    def __init__(self, items: Sequence[Item], layouts: dict[int, Layout]) -> None:
        """`layouts` of the parameters by number, all of the same ranks."""
        some = next(iter(layouts.values()))
        self.rank, self.num_ranks, self.group = some.rank, len(some.boxes), some.group
        assert all((x.rank, x.ranks) == (some.rank, some.ranks) for x in layouts.values())
        self.layouts = layouts
        self.items = choose_owners(items, self.num_ranks)
        self.staying = [i for i in self.items if not i.moves and i.owner == self.rank]
        moving = [item for item in self.items if item.moves]
        self.mine = [item for item in moving if item.owner == self.rank]
        # My cells of the matrices of each owner, and each rank's cells of the matrices I own.
        self.sent = [
            self._pieces([item for item in moving if item.owner == owner], self.rank)
            for owner in range(self.num_ranks)
        ]
        self.received = [self._pieces(self.mine, r) for r in range(self.num_ranks)]
        self.exchanges = bool(moving)

    def solve(
        self, local: dict[int, Tensor], function: Solve
    ) -> Iterator[tuple[Item, Where, Tensor]]:
        """Applies `function` to whole matrices; yields results for the cells that are here.

        Args:
            local: this rank's part `[E, R, C]` of each parameter, all of one dtype.
            function: stacks `[K, R, C]` to stacks of the same shapes and dtype, each matrix for
                itself.

        Yields:
            An item, cells of its parameter's local part, and the result for them: `[K, R, C]` where
            whole matrices are here, else of the cells' own shape.
        """
        empty = next(iter(local.values())).new_empty(0)
        here = [self._here(item, item.box) for item in self.staying]
        stacks = [
            local[item.parameter][where].reshape(item.count, item.rows, item.cols)
            for item, where in zip(self.staying, here, strict=True)
        ]
        if self.exchanges:
            stacks += self._gather(local, empty)
        done = function(stacks)
        stacks.clear()
        yield from zip(self.staying, here, done[: len(here)], strict=True)
        if self.exchanges:
            yield from self._give_back(done[len(here) :], empty)

    def _gather(self, local: dict[int, Tensor], empty: Tensor) -> list[Tensor]:
        """The moving matrices that this rank owns, whole: one all-to-all."""
        cells = [
            local[piece.item.parameter][self._here(piece.item, piece.box)]
            for piece in _in_order(self.sent)
        ]
        arrived = self._all_to_all(cells, self.sent, self.received, empty)
        whole = {item: empty.new_empty(item.box.shape) for item in self.mine}
        places = [
            whole[piece.item][piece.box.within(piece.item.box)]
            for piece in _in_order(self.received)
        ]
        if places:
            torch._foreach_copy_(places, arrived)
        return [x.view(item.count, item.rows, item.cols) for item, x in whole.items()]

    def _give_back(
        self, done: Sequence[Tensor], empty: Tensor
    ) -> Iterator[tuple[Item, Where, Tensor]]:
        """Results of the moving matrices for the cells of this rank: the other all-to-all."""
        whole = {
            item: x_KRC.reshape(item.box.shape) for item, x_KRC in zip(self.mine, done, strict=True)
        }
        cells = [
            whole[piece.item][piece.box.within(piece.item.box)]
            for piece in _in_order(self.received)
        ]
        arrived = self._all_to_all(cells, self.received, self.sent, empty)
        for piece, part in zip(_in_order(self.sent), arrived, strict=True):
            yield piece.item, self._here(piece.item, piece.box), part

    def _all_to_all(
        self,
        cells: list[Tensor],
        leaving: Sequence[Sequence[Piece]],
        arriving: Sequence[Sequence[Piece]],
        empty: Tensor,
    ) -> list[Tensor]:
        """Sends `cells`, the pieces of `leaving` in order; returns the pieces of `arriving`."""
        there = [sum(piece.box.size for piece in pieces) for pieces in leaving]
        back = [sum(piece.box.size for piece in pieces) for pieces in arriving]
        packed, arrived = empty.new_empty(sum(there)), empty.new_empty(sum(back))
        if cells:
            torch._foreach_copy_(_unpacked(packed, leaving), cells)
        dist.all_to_all_single(arrived, packed, back, there, self.group)
        return _unpacked(arrived, arriving)

    def _pieces(self, items: Sequence[Item], rank: int) -> list[Piece]:
        """The cells of `items` that `rank` holds, in order; items without any are left out."""
        pieces = []
        for item in items:
            box = self.layouts[item.parameter].boxes[rank].meet(item.box)
            if box is not None:
                pieces.append(Piece(item, box))
        return pieces

    def _here(self, item: Item, box: Box) -> Where:
        """Cells of an item in this rank's part of the parameter."""
        return box.within(self.layouts[item.parameter].boxes[self.rank])


def _in_order(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Pieces by rank, as they lie in a buffer."""
    return [piece for of_rank in pieces for piece in of_rank]


def _unpacked(buffer: Tensor, pieces: Sequence[Sequence[Piece]]) -> list[Tensor]:
    """The pieces that lie one after the other in a flat buffer, as views."""
    boxes = [piece.box for piece in _in_order(pieces)]
    parts = buffer.split([box.size for box in boxes]) if boxes else ()
    return [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)]
