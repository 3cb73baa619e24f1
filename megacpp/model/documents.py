"""Where packed documents start and end in a batch of rows; every mixer stops there.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Documents:
    """Document boundaries of a batch `[B, T]`.

    Attributes:
        ids_BT: int64, constant within a document, different in neighbouring documents.
        positions_BT: int64, 0 at the first token of a document.
        whole: every row is one document, so that mixers may take their unmasked fast path.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    whole: bool = False
    _memo: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @staticmethod
    def rows(batch: int, tokens: int, device: torch.device | str = "cpu") -> Documents:
        """One document per row."""
        positions_T = torch.arange(tokens, device=device)
        ids_BT = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
        return Documents(ids_BT, positions_T.expand(batch, tokens), whole=True)

    @staticmethod
    def from_ids(ids_BT: Tensor) -> Documents:
        """From document ids; a change of id starts a document."""
        starts_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        starts_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
        steps_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        last_start_BT = torch.where(starts_BT, steps_T, 0).cummax(dim=1).values
        return Documents(starts_BT.cumsum(1) - 1, steps_T - last_start_BT)

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Tensor) -> Documents:
        """From the boundaries `[0, ..., T]` of one packed row (B = 1)."""
        lengths = cu_seqlens.diff().to(torch.int64)
        ids_T = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return Documents.from_ids(ids_T[None])

    @property
    def starts_BT(self) -> Tensor:
        """bool: the first token of a document."""
        return self.positions_BT == 0

    @property
    def ends_BT(self) -> Tensor:
        """bool: the last token of a document."""
        return self.memo(
            "ends", lambda: torch.nn.functional.pad(self.starts_BT[:, 1:], (0, 1), value=True)
        )

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 boundaries of all documents of the flattened batch `[B * T]` (library kernels)."""
        return self.memo("cu_seqlens", self._cu_seqlens)

    def memo(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()` once per batch and key: masks and angles that every layer shares."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]

    def to(self, device: torch.device | str) -> Documents:
        """The same boundaries on another device."""
        return Documents(self.ids_BT.to(device), self.positions_BT.to(device), self.whole)

    def _cu_seqlens(self) -> Tensor:
        starts = self.starts_BT.flatten().nonzero().flatten()
        return torch.nn.functional.pad(starts, (0, 1), value=self.ids_BT.numel()).to(torch.int32)


def documents_of(x_BTD: Tensor, docs: Documents | None) -> Documents:
    """`docs`, or one document per row of `x_BTD` when it is None."""
    return (
        docs if docs is not None else Documents.rows(x_BTD.shape[0], x_BTD.shape[1], x_BTD.device)
    )
