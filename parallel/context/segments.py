"""Segments: the chunks of a row that a context rank holds, as rows of their own.

Legend: B rows, t this rank's tokens of a row, J chunks of a rank, C tokens of a chunk, S = B J
segments (the chunks of row 0 first), L chunks of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable
from parallel.context.layout import ContextLayout


def row_of(docs: Documents | None, layout: ContextLayout) -> Documents:
    """Return the documents of whole rows, to which documents of a part refer."""
    assert docs is not None and docs.row is not None, "a context rank's documents are a part"
    assert docs.ids_BT.shape[1] * layout.degree == docs.row.ids_BT.shape[1], "a rank's even share"
    return docs.row


def cut(x: Tensor, layout: ContextLayout, dim: int = 1) -> Tensor:
    """Return `[B, ..., t, ...]`, with its tokens along `dim`, as `[S, ..., C, ...]`."""
    return x.unflatten(dim, (layout.per_rank, -1)).movedim(dim, 1).flatten(0, 1)


def joined(x_SC: Tensor, layout: ContextLayout) -> Tensor:
    """Return `[S, C, ...]` as `[B, t, ...]`, the inverse of `cut`."""
    return x_SC.unflatten(0, (-1, layout.per_rank)).flatten(1, 2)


def segment_documents(docs: Documents | None, layout: ContextLayout) -> Documents:
    """Return the documents of the segments; ids and positions stay those of the row."""
    whole = row_of(docs, layout).whole
    assert docs is not None

    def make() -> Documents:
        ids_SC, positions_SC = cut(docs.ids_BT, layout), cut(docs.positions_BT, layout)
        known = docs.boundaries if docs.pieces == layout.per_rank else None
        return Documents(ids_SC, positions_SC, whole, boundaries=None if whole else known)

    return docs.memo(("segments", layout), make)


def continues(segments: Documents) -> Tensor:
    """Return bool `[S]`: the segment's first token belongs to the document of the token before."""
    return segments.positions_BT[:, 0] > 0


def carries(docs: Documents, layout: ContextLayout) -> Tensor:
    """Return bool `[L, B]`: no document starts in the chunk, its first token included."""
    row = row_of(docs, layout)

    def make() -> Tensor:
        starts_BLC = row.starts_BT.unflatten(1, (layout.num_chunks, -1))
        return ~starts_BLC.any(-1).t()

    return docs.memo(("carries", layout), make)


def linked(x: Tensor, other: Tensor) -> Tensor:
    """Return `x`; backward runs through `other` too, with no gradient from here.

    A collective's backward needs every rank, also one that doesn't use the received tensor.

    Args:
        x: any shape.
        other: any shape.
    """
    return _Linked.apply(x, other)  # type: ignore[return-value]


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
