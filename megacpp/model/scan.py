"""Interface of a recurrence over tokens, as context parallelism uses it.

A mixer calls `self.scan(inputs, weights, docs)`, a submodule that runs whole rows on one device.
parallel/context/scan.py puts another submodule with the same call in its place, by one of three
exchanges. A recurrence takes part in an exchange by offering what the exchange calls:

heads    `SequenceScan`: inputs and weights know the dims of their tokens and heads, so that tokens
         of all heads can become whole rows of some heads
state    `FoldingScan`: a part of a row has a summary that needs no scan, and summaries fold into
         the state that enters each part
serial   `CarryingScan`: a scan from a state returns the state behind its last token

Legend: B rows, T tokens of a row, H heads, V value dim, S segments (parts of rows), L parts of a
row, X numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from megacpp.model.documents import Documents


class ScanDims(NamedTuple):
    """Dims of a tensor along which its tokens and its heads lie."""

    tokens: int
    heads: int


@dataclass(frozen=True, eq=False)
class TensorFields:
    """Base of dataclasses of tensors, some of which may be None."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that hold a tensor, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a copy with other tensors in these fields."""
        return replace(self, **tensors)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `fn` applied to every tensor."""
        return self.with_tensors({name: fn(x) for name, x in self.tensors().items()})


@dataclass(frozen=True, eq=False)
class TokenTensors(TensorFields):
    """Base of a scan's inputs: every tensor has a token and a head dim.

    Neighbouring heads may share one: a tensor may have fewer heads when their number divides.

    Attributes:
        DIMS: of the fields that are not `[B, T, heads, ...]`.
    """

    DIMS: ClassVar[Mapping[str, ScanDims]] = {}

    @property
    def num_heads(self) -> int:
        """Heads of the scan: those of the tensor with the most."""
        return max(x.shape[self.dims(name).heads] for name, x in self.tensors().items())

    def dims(self, name: str) -> ScanDims:
        """Return the dims of tokens and heads in a field."""
        return self.DIMS.get(name, ScanDims(1, 2))

    def map_dims(self, fn: Callable[[Tensor, ScanDims], Tensor]) -> Self:
        """Return a copy with `fn` applied to every tensor and its dims."""
        return self.with_tensors({n: fn(x, self.dims(n)) for n, x in self.tensors().items()})


@dataclass(frozen=True, eq=False)
class HeadTensors(TensorFields):
    """Base of a scan's parameters: heads along dim 0 of every tensor. Without fields: none."""

    def heads(self, chosen: slice) -> Self:
        """Return a copy for some of the heads (views: gradients land in the whole parameter)."""
        return self.map(lambda x_H: x_H[chosen])


@dataclass(frozen=True, eq=False)
class RowTensors(TensorFields):
    """Base of states and summaries: one entry per row (or segment) along dim 0 of every tensor."""

    def packed(self) -> Tensor:
        """Return all tensors as `[S, X]`, one message."""
        return torch.cat([x.flatten(1) for x in self.tensors().values()], 1)

    def unpacked(self, flat_SX: Tensor) -> Self:
        """Return a copy with the tensors of rows that `packed` made one tensor of (views)."""
        shapes = {name: x.shape[1:] for name, x in self.tensors().items()}
        parts = flat_SX.split([shape.numel() for shape in shapes.values()], 1)
        named = zip(shapes.items(), parts, strict=True)
        return self.with_tensors({name: part.unflatten(1, shape) for (name, shape), part in named})

    def kept(self, keep_S: Tensor) -> Self:
        """Return a copy with zeros in the rows that `keep_S` excludes."""
        return self.map(lambda x_S: kept(x_S, keep_S))

    def rows(self, chosen: slice) -> Self:
        """Return a copy with some of the rows."""
        return self.map(lambda x_S: x_S[chosen])

    @classmethod
    def joined(cls, parts: Sequence[Self], join: Callable[[list[Tensor]], Tensor]) -> Self:
        """Return a copy in which `join` made each field from that field of all parts."""
        fields = [part.tensors() for part in parts]
        return parts[0].with_tensors({name: join([f[name] for f in fields]) for name in fields[0]})


def kept(x_S: Tensor, keep_S: Tensor) -> Tensor:
    """Return `x_S` `[S, ...]` with zeros in the rows that `keep_S` excludes."""
    return torch.where(keep_S.view(-1, *[1] * (x_S.ndim - 1)), x_S, 0.0)


class SequenceScan(Protocol):
    """Submodule of a mixer in which all tokens of a document meet."""

    def __call__(self, inputs: Any, weights: Any, docs: Documents | None) -> Tensor:
        """Return outputs `[B, T, H, V]` from `TokenTensors` and `HeadTensors`."""
        ...


class FoldingScan(Protocol):
    """Scan whose segments have summaries that need no scan."""

    def __call__(self, inputs: Any, weights: Any, docs: Documents, entering: Any = None) -> Tensor:
        """Return outputs `[B, T, H, V]`; each row's first document continues from `entering`."""
        ...

    def summarize(self, inputs: Any, weights: Any, docs: Documents) -> RowTensors:
        """Return the summary of each row of `inputs` for the other segments, in at least fp32."""
        ...

    def fold(
        self, summaries: Sequence[Any], carries_LS: Tensor, weights: Any
    ) -> Sequence[RowTensors]:
        """Return the state that enters each segment of a row.

        Args:
            summaries: of the segments from left to right; S counts rows here.
            carries_LS: bool, no document starts in the segment.
            weights: of the recurrence.
        """
        ...


class CarryingScan(Protocol):
    """Scan of a part of each row that takes a state and returns the next part's."""

    def empty_state(self, inputs: Any, weights: Any) -> Tensor:
        """Return zeros `[B, ...]`, the state in front of a row."""
        ...

    def carried(
        self, inputs: Any, weights: Any, docs: Documents, entering: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs `[B, T, H, V]`, and the state behind the last token of each row.

        Args:
            inputs: `TokenTensors` of some tokens of each row.
            weights: `HeadTensors`.
            docs: documents of these tokens.
            entering: state `[B, ...]` in front of the first token.
        """
        ...
