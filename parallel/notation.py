"""Bracket notation: which dim of a tensor lies on which mesh axis, as text that runs.

    [Q_tp, D]                       a parameter: dim 0 cut over `tp`, dim 1 whole
    x[B, T_tp, D] -> x[B, T, D]     an activation that is gathered along dim 1
    y[B, T, D]{tp} -> y[B, T_tp, D] one that is a partial sum on each rank, summed and cut
    v[B, T_tp, C] -> v[B, T, C_tp]  one that is cut along another dim instead

The letters name dims for the reader; the axes after `_` and in braces are what is done. Notation as
in "How to Scale Your Model" (jax-ml.github.io/scaling-book), with `{X}` for its `{U_X}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from parallel.all_to_all import exchange
from parallel.collectives import gather, scatter_sum

Kind = Literal["gather", "scatter_sum", "exchange"]

_ARRAY = re.compile(r"^(\w*)\[([^\]]*)\](?:\{(\w+)\})?$")


@dataclass(frozen=True)
class Array:
    """Tensor in brackets.

    Attributes:
        name: before the brackets.
        dims: letter of each dim.
        axes: the mesh axis that shards each dim, or None.
        partial: the axis over which the ranks' values are still to be summed, or None.
    """

    name: str
    dims: tuple[str, ...]
    axes: tuple[str | None, ...]
    partial: str | None = None

    @staticmethod
    def parse(text: str) -> Array:
        """Return the array that `x[B, T_tp, D]`, `[Q_tp, D]` or `y[B, T, D]{tp}` denotes.

        Raises:
            ValueError: no such notation, or a mesh axis that is used twice.
        """
        match = _ARRAY.match(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not written as name[A, B_axis]{{axis}}")
        parts = [part.strip().partition("_") for part in match[2].split(",")]
        dims = tuple(letter for letter, _, _ in parts)
        axes = tuple(axis or None for _, _, axis in parts)
        used = [axis for axis in (*axes, match[3]) if axis]
        for axis in used:
            if used.count(axis) > 1:
                raise ValueError(f"mesh axis {axis!r} is used twice in {text!r}")
        return Array(match[1], dims, axes, match[3])

    def dim_on(self, axis: str) -> int | None:
        """Return the dim that `axis` shards, or None."""
        return self.axes.index(axis) if axis in self.axes else None

    def placement(self, axis: str) -> Placement:
        """Return DTensor's placement on one axis."""
        dim = self.dim_on(axis)
        return Replicate() if dim is None else Shard(dim)

    def __str__(self) -> str:
        dims = ", ".join(
            d if a is None else f"{d}_{a}" for d, a in zip(self.dims, self.axes, strict=True)
        )
        return f"{self.name}[{dims}]" + (f"{{{self.partial}}}" if self.partial else "")


@dataclass(frozen=True)
class Redistribute:
    """Change of an activation's layout, by one collective over one mesh axis.

    Attributes:
        before, after: the layouts.
        kind: `gather`, `scatter_sum` or `exchange`.
        axis: the mesh axis of the collective.
        dim: the dim that is joined, or that a sum is sharded along.
        split: the dim that an exchange splits, else None.
    """

    before: Array
    after: Array
    kind: Kind
    axis: str
    dim: int
    split: int | None = None

    @staticmethod
    def parse(text: str) -> Redistribute:
        """Return the change that `x[B, T_tp, D] -> x[B, T, D]` denotes.

        Raises:
            ValueError: no single collective makes the change.
        """
        left, arrow, right = text.partition("->")
        before, after = Array.parse(left), Array.parse(right)
        if not arrow or before.dims != after.dims:
            raise ValueError(f"{text!r} does not move one tensor")
        axis = before.partial or _leaving_axis(before, after)
        if axis is not None and not after.partial:
            cut, now = before.dim_on(axis), after.dim_on(axis)
            others_stay = _without(before, axis) == _without(after, axis)
            if others_stay and before.partial and now is not None:
                return Redistribute(before, after, "scatter_sum", axis, now)
            if others_stay and not before.partial and cut is not None:
                kind: Kind = "gather" if now is None else "exchange"
                return Redistribute(before, after, kind, axis, cut, now)
        raise ValueError(f"{text!r} is neither a gather nor a sum that is cut nor an exchange")

    @property
    def names(self) -> tuple[str, str]:
        """Names of the collectives of the forward and of the backward."""
        if self.kind == "exchange":
            return "all-to-all", "all-to-all"
        both = "all-gather", "reduce-scatter"
        return both if self.kind == "gather" else (both[1], both[0])

    def over(self, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
        """Return the collective that maps a rank's tensor to the new layout, with its gradient."""
        group = mesh.get_group()
        if self.split is not None:
            return partial(exchange, split=self.split, join=self.dim, group=group)
        collective = gather if self.kind == "gather" else scatter_sum
        return partial(collective, dim=self.dim, group=group)

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"


def _leaving_axis(before: Array, after: Array) -> str | None:
    """Return the mesh axis that no longer shards a dim that it sharded."""
    pairs = zip(before.axes, after.axes, strict=True)
    return next((a for a, b in pairs if a and a != b), None)


def _without(array: Array, axis: str) -> tuple[str | None, ...]:
    """Return the axes of all dims, with None in place of `axis`."""
    return tuple(None if a == axis else a for a in array.axes)
