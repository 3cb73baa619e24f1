"""Batches of packed rows for the model.

Legend: B rows, T tokens of a row, S sources of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megacpp.model.beside import beside
from megacpp.model.documents import Documents
from megacpp.torch_extras import to_device

IGNORED = -100  # label of a position that predicts nothing


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows ready for the model.

    Attributes:
        ids_BT: int64 tokens.
        labels_BT: int64, the next token, or -100 at the end of a document and on padding.
        docs: starts of packed documents.
        target_bytes: UTF-8 bytes of the valid labels (for bits per byte).
        num_targets: number of valid labels.
        rows: global row numbers (training) or row numbers of the split (validation).
        sources_SB: of a mixture: 1 where a row is of a source, else 0, fp64.
        source_targets: of a mixture: number of valid labels by source.
    """

    ids_BT: Tensor
    labels_BT: Tensor
    docs: Documents
    target_bytes: int
    num_targets: int
    rows: tuple[int, ...]
    sources_SB: Tensor | None = None
    source_targets: Sequence[int] = ()

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to another device."""
        found: dict[str, Any] = {"docs": self.docs.to(device)}
        for name in ("ids_BT", "labels_BT", "sources_SB"):
            if (x := getattr(self, name)) is not None:
                found[name] = to_device(x, device)
        return replace(self, **found)

    def split(self, parts: int) -> list[Batch]:
        """Return equal parts, some rows each; the first has bytes and sources of all labels."""
        each, rest = divmod(len(self.ids_BT), parts)
        assert not rest and self.docs.row is None and self.docs.tokens_BT is None
        found = []
        for first in range(0, len(self.ids_BT), each):
            here = slice(first, first + each)
            labels_BT, docs = self.labels_BT[here], self.docs
            part = Batch(
                ids_BT=self.ids_BT[here],
                labels_BT=labels_BT,
                docs=Documents(docs.ids_BT[here], docs.positions_BT[here], docs.whole),
                target_bytes=0 if first else self.target_bytes,
                num_targets=int((labels_BT != IGNORED).sum()),
                rows=self.rows[here],
                sources_SB=None if self.sources_SB is None else self.sources_SB[:, here],
                source_targets=[] if first else self.source_targets,
            )
            found.append(part)
        return found

    def with_tokens(self) -> Batch:
        """Attach ids and labels of whole rows to the documents."""
        return replace(self, docs=self.docs.with_tokens(self.ids_BT, self.labels_BT))

    def num_ahead(self, depth: int) -> Tensor:
        """Return the number of valid labels `depth` tokens further ahead in whole rows, 0-d."""
        assert self.docs.row is None, "a part of the rows"
        ahead_BT = beside(self.labels_BT, self.docs.ids_BT, depth, IGNORED)
        return (ahead_BT != IGNORED).sum()

    def take(self, index_T: Tensor, pieces: int = 1) -> Batch:
        """Select tokens of every row (`Documents.take`); counts stay those of whole rows."""
        ids_BT, labels_BT = self.ids_BT[:, index_T], self.labels_BT[:, index_T]
        docs = self.docs.take(index_T, pieces)
        return replace(self, ids_BT=ids_BT, labels_BT=labels_BT, docs=docs)
