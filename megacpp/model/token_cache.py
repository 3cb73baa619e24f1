"""Cache of the tokens decoded so far: buffers that are written in place.

`reserve` makes them once for all tokens to come; without it they grow by doubling.

Legend: B rows, S cached tokens of the longest row, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenCache:
    """Tensors `[B, S, ...]` of cached tokens; rows may differ in length.

    A longer cache shares its buffers with the one that it continues. Of two continuations of one
    cache the one made last is valid. With a window a row keeps its last tokens alone, each at the
    remainder of its position: a new one overwrites the oldest.

    Attributes:
        buffers: `[B, room, ...]` each, with room for S tokens or more.
        lengths_B: int64, tokens of each row so far, the position of its next one.
        longest: tokens of the longest row so far.
        even: all rows have as many tokens.
        window: tokens of a row that are kept (0: all).
    """

    buffers: tuple[Tensor, ...]
    lengths_B: Tensor
    longest: int
    even: bool = True
    window: int = 0

    @staticmethod
    def empty(*parts_B0: Tensor, window: int = 0) -> TokenCache:
        """Return a cache without tokens, of parts `[B, 0, ...]`."""
        lengths_B = torch.zeros(len(parts_B0[0]), dtype=torch.int64, device=parts_B0[0].device)
        return TokenCache(parts_B0, lengths_B, 0, window=window)

    @staticmethod
    def filled(*parts_BT: Tensor, window: int = 0) -> TokenCache:
        """Return a cache of the tokens of parts `[B, T, ...]`."""
        rows, longest = parts_BT[0].shape[:2]
        lengths_B = torch.full((rows,), longest, device=parts_BT[0].device)
        if window and longest > window:
            parts_BT = tuple(x[:, -window:].roll(longest % window, 1) for x in parts_BT)
        return TokenCache(parts_BT, lengths_B, longest, window=window)

    @property
    def parts_BS(self) -> tuple[Tensor, ...]:
        """Views `[B, S, ...]` of the cached tokens."""
        return tuple(buffer[:, : self.kept(self.longest)] for buffer in self.buffers)

    @property
    def positions_B1(self) -> Tensor:
        """Positions of the next tokens, `[1, 1]` where all rows are even, else `[B, 1]`."""
        return self.lengths_B[:1, None] if self.even else self.lengths_B[:, None]

    @property
    def mask_BS(self) -> Tensor | None:
        """Return bool `[B, S]`, True where a row has a token; None: everywhere."""
        if self.even:
            return None
        at_S = torch.arange(self.kept(self.longest), device=self.lengths_B.device)
        return at_S < self.lengths_B[:, None]

    def kept(self, tokens: int) -> int:
        """Return how many of a row's tokens are kept."""
        return min(tokens, self.window or tokens)

    def append(self, *parts_B1: Tensor) -> TokenCache:
        """Return the cache with one more token for each row, from parts `[B, 1, ...]`."""
        grown, size = self.with_room(self.longest + 1), self.window or self.longest + 1
        for buffer, part_B1 in zip(grown.buffers, parts_B1, strict=True):
            if self.even:
                buffer[:, self.longest % size] = part_B1[:, 0]
            else:
                rows_B = torch.arange(len(buffer), device=buffer.device)
                buffer[rows_B, self.lengths_B % size] = part_B1[:, 0].to(buffer.dtype)
        return replace(grown, lengths_B=self.lengths_B + 1, longest=self.longest + 1)

    def with_room(self, tokens: int, more: int = 2) -> TokenCache:
        """Return the cache in buffers for `tokens`; new ones have `more` times that room."""
        if all(buffer.shape[1] >= self.kept(tokens) for buffer in self.buffers):
            return self
        room = self.kept(more * tokens)
        return replace(self, buffers=tuple(_wider(b, room) for b in self.buffers))


def reserve(states: list[Any], tokens: int) -> None:
    """Make the buffers of all blocks' decoding states, in place, for so many further tokens."""

    def wider(part: Tensor | TokenCache) -> Any:
        return part if isinstance(part, Tensor) else part.with_room(part.longest + tokens, more=1)

    for i, state in enumerate(states):  # the prompt's own buffers leave block by block
        states[i] = mapped(state, wider)


def joined(states: list[Any]) -> Any:
    """Return decoding states of several batches as the state of one batch, rows in their order."""
    first = states[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(states)
    if isinstance(first, TokenCache):
        longest = max(cache.longest for cache in states)
        even = all(cache.even and cache.longest == longest for cache in states)
        buffers = [cache.with_room(longest).buffers for cache in states]
        room = min(buffer.shape[1] for parts in buffers for buffer in parts)
        cut = [[buffer[:, :room] for buffer in parts] for parts in zip(*buffers, strict=True)]
        lengths_B = torch.cat([cache.lengths_B for cache in states])
        joint = tuple(torch.cat(parts) for parts in cut)
        return TokenCache(joint, lengths_B, longest, even, first.window)
    if is_dataclass(first):
        named = {f.name: joined([getattr(s, f.name) for s in states]) for f in fields(first)}
        return type(first)(**named)
    return type(first)(joined(list(parts)) for parts in zip(*states, strict=True))


def chosen_rows(state: Any, rows_B: Tensor) -> Any:
    """Return the decoding state of some rows of a batch.

    Args:
        state: of a block or of a model.
        rows_B: int64, their numbers.
    """

    def chosen(part: Tensor | TokenCache) -> Any:
        if isinstance(part, Tensor):
            return part[rows_B]
        buffers, lengths_B = tuple(b[rows_B] for b in part.buffers), part.lengths_B[rows_B]
        return replace(part, buffers=buffers, lengths_B=lengths_B)

    return mapped(state, chosen)


def mapped(state: Any, change: Callable[[Tensor | TokenCache], Any]) -> Any:
    """Return a decoding state whose tensors and caches are changed.

    Args:
        state: of a block or of a model.
        change: of a tensor or a cache.
    """
    if state is None or isinstance(state, Tensor | TokenCache):
        return state if state is None else change(state)
    if is_dataclass(state):
        named = {f.name: mapped(getattr(state, f.name), change) for f in fields(state)}
        return type(state)(**named)
    return type(state)(mapped(part, change) for part in state)


def _wider(buffer: Tensor, room: int) -> Tensor:
    # Zeros: what a mask hides has weight 0, and 0 times what memory held may be NaN.
    wider = buffer.new_zeros(len(buffer), room, *buffer.shape[2:])
    wider[:, : buffer.shape[1]] = buffer
    return wider
