"""Where packed documents start and end in a batch of rows; every mixer stops there.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
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
        row: of a part of the tokens (`take`), the documents of the whole rows; else None.
        index_T: of a part, the positions in the row of its tokens; else None.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    whole: bool = False
    row: Documents | None = None
    index_T: Tensor | None = None

    def __post_init__(self) -> None:
        # No field: FSDP2 looks for tensors in the fields of what a module is given, and a part
        # that is remembered here points back to its row.
        object.__setattr__(self, "_memo", {})

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
        if self.row is not None:
            row, index_T = self.row, self.index_T
            return self.memo("ends", lambda: row.ends_BT[:, index_T])
        return self.memo(
            "ends", lambda: torch.nn.functional.pad(self.starts_BT[:, 1:], (0, 1), value=True)
        )

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 boundaries of all documents of the flattened batch `[B * T]` (library kernels)."""
        return self.memo("cu_seqlens", self._cu_seqlens)

    def memo(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()` once per batch and key: masks and angles that every layer shares."""
        memo: dict[Hashable, object] = vars(self)["_memo"]
        if key not in memo:
            memo[key] = make()
        return memo[key]  # type: ignore[return-value]

    def forget(self) -> None:
        """Lets go of what was remembered, when no backward is to come.

        A part that its row remembers points back at it: the two would wait for the garbage
        collector, and hold their masks until then.
        """
        vars(self)["_memo"].clear()
        if self.row is not None:
            self.row.forget()

    def take(self, index_T: Tensor) -> Documents:
        """Some tokens of every row, in the order of `index_T`; ids and positions stay those of
        the row, which the part remembers. A part of a part is a part of the row."""
        if self.row is not None:
            assert self.index_T is not None
            return self.row.take(self.index_T[index_T])
        ids_BT, positions_BT = self.ids_BT[:, index_T], self.positions_BT[:, index_T]
        return Documents(ids_BT, positions_BT, False, self, index_T)

    def to(self, device: torch.device | str) -> Documents:
        """The same boundaries on another device."""
        return Documents(
            self.ids_BT.to(device),
            self.positions_BT.to(device),
            self.whole,
            None if self.row is None else self.row.to(device),
            None if self.index_T is None else self.index_T.to(device),
        )

    def _cu_seqlens(self) -> Tensor:
        starts = self.starts_BT.flatten().nonzero().flatten()
        return torch.nn.functional.pad(starts, (0, 1), value=self.ids_BT.numel()).to(torch.int32)


def documents_of(x_BTD: Tensor, docs: Documents | None) -> Documents:
    """`docs`, or one document per row of `x_BTD` when it is None."""
    return (
        docs if docs is not None else Documents.rows(x_BTD.shape[0], x_BTD.shape[1], x_BTD.device)
    )
