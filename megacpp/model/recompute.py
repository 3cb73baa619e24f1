"""Recompute regions: parts of a block's forward that the backward may run again.

A module calls its regions through its attribute `recompute`. By default that is a plain call;
checkpointing/ assigns an object that drops what autograd saves inside a region, and the region's
results as well, and runs the region again when the backward asks for one of them.

    q_BTNH = self.recompute("mla_q_upproj", self._expand_q, latent_BTC)

A region is a function of its tensor arguments and of parameters that it reads itself when it runs
(never closed over: a sharded model replaces them between forward and backward). It returns a tensor
or a tuple of tensors and has no other effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from megacpp.model.regions import Region

R = TypeVar("R")


class Recompute(Protocol):
    """Callable through which a module runs its recompute regions."""

    def __call__(self, region: Region, fn: Callable[..., R], *args: object) -> R:
        """Return `fn(*args)`, which the backward may run again."""
        ...

    def keep(self, fn: Callable[..., R], *args: object) -> R:
        """Return `fn(*args)`, a decision without gradient; a recomputation gets the first result.

        The choice of experts is one: the recomputation must choose the same experts.
        """
        ...


class NoRecompute:
    """Regions run once, and autograd saves what it needs."""

    def __call__(self, region: Region, fn: Callable[..., R], *args: object) -> R:
        """Return `fn(*args)`."""
        return fn(*args)

    def keep(self, fn: Callable[..., R], *args: object) -> R:
        """Return `fn(*args)`."""
        return fn(*args)


PLAIN: Recompute = NoRecompute()


def recomputing() -> bool:
    """Return whether this forward is a recomputation: it runs inside a backward.

    Code that counts or records in a forward skips recomputations. The compiler never traces one.
    The number of the running backward, -1 outside of one, is the one that torch.utils.checkpoint
    uses itself.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
