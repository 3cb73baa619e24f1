"""Assignment of a row's tokens to context-parallel ranks.

A row of T tokens is split into equal chunks, and each rank holds some of them, in the order of the
row. `contiguous`: rank r holds chunk r of W. `head_tail`: rank r holds chunks r and 2W - 1 - r of
2W, so that causal attention costs every rank the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megacpp.data.batches import Batch

Order = Literal["contiguous", "head_tail"]


@dataclass(frozen=True)
class ContextLayout:
    """Chunks of a row by rank.

    Attributes:
        rank: this process among the ranks of the context axis.
        chunks: per rank, the numbers of its chunks, in the order in which it holds them.
    """

    rank: int
    chunks: tuple[tuple[int, ...], ...]

    @staticmethod
    def for_rank(order: Order, rank: int, degree: int) -> ContextLayout:
        """Return the layout of a named order.

        Raises:
            ValueError: no order has that name.
        """
        if order not in get_args(Order):
            raise ValueError(f"order={order!r}: must be one of {', '.join(get_args(Order))}")
        if order == "contiguous" or degree == 1:
            return ContextLayout(rank, tuple((r,) for r in range(degree)))
        return ContextLayout(rank, tuple((r, 2 * degree - 1 - r) for r in range(degree)))

    @property
    def degree(self) -> int:
        """Number of context ranks."""
        return len(self.chunks)

    @property
    def per_rank(self) -> int:
        """Number of chunks that a rank holds."""
        return len(self.chunks[0])

    @property
    def num_chunks(self) -> int:
        """Chunks of a row."""
        return self.degree * self.per_rank

    def index(self, tokens: int, rank: int | None = None) -> Tensor:
        """Return int64 positions in the row of `tokens` that `rank` (default: this one) holds."""
        assert tokens % self.num_chunks == 0, f"{tokens} tokens in {self.num_chunks} chunks"
        size = tokens // self.num_chunks
        mine = self.chunks[self.rank if rank is None else rank]
        return torch.cat([torch.arange(c * size, (c + 1) * size) for c in mine])

    def gathered_index(self, tokens: int) -> Tensor:
        """Return positions in the row of the tokens of an all-gather in rank order, `[tokens]`."""
        return torch.cat([self.index(tokens, r) for r in range(self.degree)])

    def gathered_chunks(self) -> list[int]:
        """Return chunk numbers in the order in which an all-gather returns them."""
        return [chunk for of_rank in self.chunks for chunk in of_rank]


def share(batch: Batch, layout: ContextLayout, needs_full_row: bool, device: torch.device) -> Batch:
    """Return a rank's tokens of a microbatch of whole rows, on its device.

    Args:
        batch: whole rows, on the host.
        layout: of the rank.
        needs_full_row: the model reads tokens beside its own; the documents then carry whole rows.
        device: of the rank.
    """
    if layout.degree == 1:
        batch = batch.to(device)
        return batch.with_tokens() if needs_full_row else batch
    if needs_full_row:
        batch = batch.with_tokens()
    return batch.take(layout.index(batch.ids_BT.shape[1]), layout.per_rank).to(device)
