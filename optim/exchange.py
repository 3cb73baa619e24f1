"""A wave of matrices on its way to their owners and back: two all-to-alls, packed by region.

Every rank sends its cells of each matrix to the owner, packed by owner; the owner puts matrices of
one shape together, has them solved, and returns the cells of the results. Nothing is padded. Where
replicas hold the same cells, the owner's own replica sends them, and all replicas get the results,
so the work of a matrix is done once.

Cells that cross the wire, per rank, of the M cells of all matrices that move, on S ranks that cut
them evenly and R replicas: M / (R S) to the owners and M / S back, of which 1 / (R S) is the rank's
own. Buffers live as long as the wave: optim/muon.py says when, megacpp/memory/muon.py how much.

Legend: K matrices of a batch, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from optim.boxes import Box, Layout
from optim.ownership import Item

Where = tuple[slice, ...]


class Piece(NamedTuple):
    """Cells of an item that one rank holds."""

    item: Item
    box: Box
    where: Where | None  # among what it is cut from (a rank's part, or the item); None: all of it


class Batch(NamedTuple):
    """Items of one shape that are solved together."""

    items: tuple[Item, ...]
    rows: int
    cols: int
    solver: Any

    @property
    def count(self) -> int:
        return sum(item.count for item in self.items)

    @property
    def cells(self) -> int:
        return self.count * self.rows * self.cols

    def views(self, x_KRC: Tensor) -> list[Tensor]:
        """Each item's matrices, in the shape of its box."""
        parts = x_KRC.split([item.count for item in self.items])
        return [x.reshape(i.box.shape) for i, x in zip(self.items, parts, strict=True)]


@dataclass(frozen=True)
class Kind:
    """What must agree: `pack` for momenta to move together, `solve` for matrices to be solved so.

    Attributes:
        solve: steps and coefficients of Newton-Schulz.
    """

    pack: Hashable
    solve: Any


def batches_of(items: Sequence[Item], kinds: Mapping[int, Kind], most_cells: int) -> list[Batch]:
    """Items of equal shapes together, as long as they have at most `most_cells`."""
    alike: dict[Any, list[list[Item]]] = {}
    for item in items:
        key = (item.rows, item.cols, kinds[item.parameter].solve)
        groups = alike.setdefault(key, [[]])
        if groups[-1] and sum(i.box.size for i in groups[-1]) + item.box.size > most_cells:
            groups.append([])
        groups[-1].append(item)
    return [Batch(tuple(group), *key) for key, groups in alike.items() for group in groups]


@dataclass(frozen=True)
class Rank:
    """This process in a group of ranks, and where the cells of parameters (by number) are there.

    Attributes:
        batch_cells: most of a batch, unless it is one item.
        block_cells: most of a block, unless it is one piece: whose momenta move together.
    """

    number: int
    size: int
    layouts: Mapping[int, Layout]
    kinds: Mapping[int, Kind]
    batch_cells: int
    block_cells: int

    def blocks(self, pieces: Sequence[Piece]) -> list[range]:
        """Runs of pieces of one kind."""
        kinds = [self.kinds[piece.item.parameter].pack for piece in pieces]
        edges, cells = [0], 0
        for i, piece in enumerate(pieces):
            cells += piece.box.size
            if i and (cells > self.block_cells or kinds[i] != kinds[i - 1]):
                edges.append(i)
                cells = piece.box.size
        return [range(a, b) for a, b in pairwise([*edges, len(pieces)]) if a < b]

    def here(self, item: Item, box: Box) -> Piece:
        """Cells of this rank's part of a parameter."""
        part = self.layouts[item.parameter].boxes[self.number]
        return Piece(item, box, None if part == box else box.within(part))

    def held(self, items: Sequence[Item], rank: int) -> list[tuple[Item, Box]]:
        """The cells of `items` that `rank` holds, in order; items without any are left out."""
        met = [(item, self.layouts[item.parameter].boxes[rank].meet(item.box)) for item in items]
        return [(item, box) for item, box in met if box is not None]

    def supplies(self, item: Item, rank: int) -> bool:
        """The cells of `rank` are those that the owner of `item` gets."""
        layout = self.layouts[item.parameter]
        return layout.replica(rank) == layout.replica(item.owner)


class Stay:
    """Matrices that are whole on this rank, in the order in which they lie in a buffer."""

    def __init__(self, items: Sequence[Item], rank: Rank) -> None:
        self.batches = batches_of(items, rank.kinds, rank.batch_cells)
        self.pieces = [rank.here(i, i.box) for batch in self.batches for i in batch.items]
        self.blocks = rank.blocks(self.pieces)
        self.cells = sum(batch.cells for batch in self.batches)

    def matrices(self, packed: Tensor) -> Iterator[tuple[Batch, Tensor]]:
        """Every batch as `[K, R, C]`, sharing memory with `packed`."""
        parts = packed.split([batch.cells for batch in self.batches])
        for batch, part in zip(self.batches, parts, strict=True):
            yield batch, part.view(batch.count, batch.rows, batch.cols)


class Wave:
    """Matrices that travel together.

    Attributes:
        sent: this rank's cells of the matrices of each owner, as far as its replica supplies them.
        received: each rank's cells of the matrices owned here.
        returned: the same, of every replica.
        arriving: this rank's cells of the matrices of each owner, all.
        batches: the matrices owned here.
        blocks: of the pieces that are sent.
        aside: this rank's cells that another replica sends.
    """

    def __init__(self, items: Sequence[Item], rank: Rank) -> None:
        ranks, me = range(rank.size), rank.number
        owned: list[list[Item]] = [[] for _ in ranks]
        for item in items:
            owned[item.owner].append(item)
        mine = owned[me]
        self.arriving = [[rank.here(*p) for p in rank.held(some, me)] for some in owned]
        self.sent = [[p for p in some if rank.supplies(p.item, me)] for some in self.arriving]
        self.returned = [[_inside(*p) for p in rank.held(mine, r)] for r in ranks]
        self.received = [
            [p for p in some if rank.supplies(p.item, r)] for r, some in enumerate(self.returned)
        ]
        self.batches = batches_of(mine, rank.kinds, rank.batch_cells)
        self.blocks = rank.blocks(flat(self.sent))
        self.aside = [p for p in flat(self.arriving) if not rank.supplies(p.item, me)]
        self.aside_blocks = rank.blocks(self.aside)
        received, returned = by_item(flat(self.received)), by_item(flat(self.returned))
        self._sources = [_places(batch, received) for batch in self.batches]
        self._targets = [_places(batch, returned) for batch in self.batches]

    @property
    def copied(self) -> list[tuple[Batch, int]]:
        """The batches, and how many cells of each are put together first."""
        both = zip(self.batches, self._sources, strict=True)
        return [(batch, batch.cells if len(places) > 1 else 0) for batch, places in both]

    def solve(self, arrived: Tensor, function: Callable[[Batch, Tensor], Tensor]) -> Tensor:
        """What goes back: `function` of each batch of matrices, in regions by rank."""
        back = arrived.new_empty(sum(sizes(self.returned)))
        sources = unpacked(arrived, flat(self.received))
        targets = unpacked(back, flat(self.returned))
        for batch, arriving, leaving in zip(
            self.batches, self._sources, self._targets, strict=True
        ):
            o_KRC = function(batch, _assembled(batch, arriving, sources))
            views = batch.views(o_KRC)
            torch._foreach_copy_(
                [targets[place.number] for place in leaving],
                [place.of(views[place.item]) for place in leaving],
            )
            del o_KRC, views  # not to be alive while the next batch is solved
        return back


class Place(NamedTuple):
    """A region of a batch: number of its piece, and of its item in the batch."""

    number: int
    item: int
    where: Where | None

    def of(self, item: Tensor) -> Tensor:
        return item if self.where is None else item[self.where]


def _places(batch: Batch, numbers: dict[int, list[tuple[int, Piece]]]) -> list[Place]:
    return [
        Place(number, i, piece.where)
        for i, item in enumerate(batch.items)
        for number, piece in numbers[id(item)]
    ]


def _assembled(batch: Batch, places: Sequence[Place], parts: Sequence[Tensor]) -> Tensor:
    """The matrices of a batch from their regions, `[K, R, C]`; no copy of a single region."""
    if len(places) == 1:
        return parts[places[0].number].view(batch.count, batch.rows, batch.cols)
    x_KRC = parts[places[0].number].new_empty(batch.count, batch.rows, batch.cols)
    views = batch.views(x_KRC)
    torch._foreach_copy_(
        [place.of(views[place.item]) for place in places],
        [parts[place.number] for place in places],
    )
    return x_KRC


class Flight:
    """An all-to-all under way; `wait` for what arrives, after which what was sent is let go."""

    def __init__(
        self,
        packed: Tensor,
        leaving: Sequence[Sequence[Piece]],
        arriving: Sequence[Sequence[Piece]],
        group: dist.ProcessGroup | None,
    ) -> None:
        back = sizes(arriving)
        self._packed: Tensor | None = packed
        self._arrived: Tensor | None = packed.new_empty(sum(back))
        self._work = dist.all_to_all_single(
            self._arrived, packed, back, sizes(leaving), group, async_op=True
        )

    def wait(self) -> Tensor:
        arrived = self._arrived
        assert self._work is not None and arrived is not None, "waited for already"
        self._work.wait()
        self._work = self._packed = self._arrived = None
        return arrived


def sizes(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """Cells for, or from, each rank."""
    return [sum(piece.box.size for piece in some) for some in pieces]


def flat(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Pieces by rank, as they lie in a buffer."""
    return [piece for some in pieces for piece in some]


def unpacked(buffer: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The pieces that lie one after the other in a flat buffer, as views."""
    if not pieces:
        return []
    parts = buffer.split([piece.box.size for piece in pieces])
    return [part.view(piece.box.shape) for part, piece in zip(parts, pieces, strict=True)]


def _inside(item: Item, box: Box) -> Piece:
    """Cells of an item, placed within it."""
    return Piece(item, box, None if box == item.box else box.within(item.box))


def by_item(pieces: Sequence[Piece]) -> dict[int, list[tuple[int, Piece]]]:
    """The pieces of each item, by its id, with their numbers."""
    found: dict[int, list[tuple[int, Piece]]] = {}
    for number, piece in enumerate(pieces):
        found.setdefault(id(piece.item), []).append((number, piece))
    return found
