"""Where a block's forward may be cut: what runs again in backward instead of being kept.

A module calls the pieces that are worth it through its `seam`. By default that is a plain call;
checkpointing/ puts something in its place that drops what a piece would keep for the backward, and
its results as well, and runs it again when the backward asks.

    q_BTNH = self.seam("mla_q_upproj", self._expand_q, latent_BTC)

A piece is a function of its tensor arguments and of parameters that it reads itself when it runs
(never closed over: a sharded model replaces them between forward and backward). It returns a tensor
or a tuple of tensors and has no effect beside that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from megacpp.model.pieces import Piece

R = TypeVar("R")


class Seam(Protocol):
    """How a module calls its pieces."""

    def __call__(self, piece: Piece, fn: Callable[..., R], *args: object) -> R:
        """`fn(*args)`."""
        ...

    def keep(self, fn: Callable[..., R], *args: object) -> R:
        """`fn(*args)`, which a recomputation takes from the first run: decisions without gradient.

        What chooses experts must choose the same ones again.
        """
        ...


class PlainSeam:
    """Every piece is called once and its tensors are kept as autograd likes."""

    def __call__(self, piece: Piece, fn: Callable[..., R], *args: object) -> R:
        return fn(*args)

    def keep(self, fn: Callable[..., R], *args: object) -> R:
        return fn(*args)


PLAIN: Seam = PlainSeam()


def recomputing() -> bool:
    """This forward runs inside a backward, for its intermediate values: it ran before.

    What counts or records in a forward must not do so again. The compiler traces no such forward.
    The engine's number of the running backward, -1 outside of one, is what torch.utils.checkpoint
    itself goes by.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
