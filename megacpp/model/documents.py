"""Boundaries of packed documents in a batch of rows; every mixer stops there.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.torch_extras import to_device

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
        pieces: of a part, the equal pieces that a row of it has, each of which starts a sequence.
        tokens_BT: int64 ids of whole rows, where something reads tokens beside its own.
        labels_BT: labels of whole rows, likewise.
        boundaries: `cu_seqlens`, if they were found where the host could see them (`to`).
        window: tokens that attention sees of a document, the query's own included (0: all).
    """

    ids_BT: Tensor
    positions_BT: Tensor
    whole: bool = False
    row: Documents | None = None
    index_T: Tensor | None = None
    pieces: int = 1
    tokens_BT: Tensor | None = None
    labels_BT: Tensor | None = None
    boundaries: Tensor | None = None
    window: int = 0

    def __post_init__(self) -> None:
        # No field: FSDP2 looks for tensors in the fields of a module's arguments, and a part that
        # is memoized here points back to its row.
        object.__setattr__(self, "_memo", {})

    @staticmethod
    def rows(batch: int, tokens: int, device: torch.device | str = "cpu") -> Documents:
        """Return documents of a batch `[batch, tokens]` in which each row is one document."""
        positions_T = torch.arange(tokens, device=device)
        ids_BT = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
        return Documents(ids_BT, positions_T.expand(batch, tokens), whole=True)

    @staticmethod
    def from_ids(ids_BT: Tensor) -> Documents:
        """Return documents from ids `[B, T]`; a change of id starts a document."""
        starts_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        starts_BT[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
        steps_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        last_start_BT = torch.where(starts_BT, steps_T, 0).cummax(dim=1).values
        return Documents(starts_BT.cumsum(1) - 1, steps_T - last_start_BT)

    @property
    def starts_BT(self) -> Tensor:
        """Whether each token is the first of a document, bool."""
        return self.positions_BT == 0

    @property
    def ends_BT(self) -> Tensor:
        """Whether each token is the last of a document, bool."""
        if self.row is not None:
            row, index_T = self.row, self.index_T
            return self.memo("ends", lambda: row.ends_BT[:, index_T])
        return self.memo("ends", lambda: F.pad(self.starts_BT[:, 1:], (0, 1), value=True))

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 boundaries `[0, ..., B * T]` of all documents of the flattened batch.

        The start of a row, or of a piece, is one too, and in a part of the tokens wherever some are
        left out. A device is waited for, unless rows are whole or came from the host by `to`.
        """
        if self.boundaries is not None:
            return self.boundaries
        return self.memo("cu_seqlens", self._cu_seqlens)

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        """Number and length of the document of every token of the flat batch, `[B * T]` each."""
        return self.memo("lengths", self._lengths)

    def memo(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return `make()`, run once per batch and key: masks and angles that every layer shares."""
        memo: dict[Hashable, object] = vars(self)["_memo"]
        if key not in memo:
            memo[key] = make()
        return memo[key]  # type: ignore[return-value]

    def note(self, key: Hashable, value: object) -> None:
        """Memoize a value for later layers (`noted`); a new value replaces an old one."""
        vars(self)["_memo"][key] = value

    def noted(self, key: Hashable) -> Any:
        """Return the value that an earlier layer memoized under `key`."""
        memo = vars(self)["_memo"]
        assert key in memo, f"no layer before this one noted {key}"
        return memo[key]

    def forget(self) -> None:
        """Drop all memos, when no backward is to come.

        A part that its row remembers points back at it: the two would wait for the garbage
        collector, and hold their masks until then.
        """
        memo = vars(self)["_memo"]
        windows = [made for made in memo.values() if isinstance(made, Documents) and made.window]
        memo.clear()
        for docs in (self.row, *windows):
            if docs is not None:
                docs.forget()

    def within(self, window: int) -> Documents:
        """Return the same documents, of which attention sees `window` tokens (0: all)."""
        if window == self.window:
            return self
        row = None if self.row is None else self.row.within(window)
        return self.memo(("within", window), lambda: replace(self, row=row, window=window))

    def take(self, index_T: Tensor, pieces: int = 1) -> Documents:
        """Return the documents of some tokens of every row, in the order of `index_T`.

        Ids and positions stay those of the row, which the part refers to. A part of a part is a
        part of the row.
        """
        if self.row is not None:
            assert self.index_T is not None
            return self.row.take(self.index_T[index_T], pieces)
        ids_BT, positions_BT = self.ids_BT[:, index_T], self.positions_BT[:, index_T]
        window = self.window
        return Documents(ids_BT, positions_BT, False, self, index_T, pieces, window=window)

    def with_tokens(self, tokens_BT: Tensor, labels_BT: Tensor) -> Documents:
        """Return the same boundaries with ids and labels of whole rows; memos are dropped."""
        assert self.row is None, "ids of a part of the tokens"
        return replace(self, tokens_BT=tokens_BT, labels_BT=labels_BT)

    def to(self, device: torch.device | str) -> Documents:
        """Return the documents on another device, with boundaries that only the host can compute.

        Computing them on a GPU would make the host wait for the number of documents.
        """
        leaves = self.ids_BT.device.type == "cpu" != torch.device(device).type
        here = replace(self, boundaries=self.cu_seqlens) if leaves and not self.whole else self
        there = {k: to_device(x, device) for k, x in vars(here).items() if isinstance(x, Tensor)}
        return replace(here, row=None if self.row is None else self.row.to(device), **there)

    def _lengths(self) -> tuple[Tensor, Tensor]:
        starts_BT = self.starts_BT
        starts_BT[:, 0] = True  # a row that is a slice may begin inside a document
        document_T = starts_BT.flatten().cumsum(0) - 1
        length_T = torch.zeros_like(document_T).scatter_(0, document_T, 1, reduce="add")
        return document_T, length_T.index_select(0, document_T)

    def _cu_seqlens(self) -> Tensor:
        (B, T), device = self.ids_BT.shape, self.ids_BT.device
        if self.whole:
            return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)
        next_BT = self.positions_BT[:, 1:] == self.positions_BT[:, :-1] + 1
        follows_BT = next_BT & (self.ids_BT[:, 1:] == self.ids_BT[:, :-1])
        starts_BT = ~F.pad(follows_BT, (1, 0), value=False)
        starts_BT[:, :: T // self.pieces] = True
        starts = starts_BT.flatten().nonzero().flatten()
        return F.pad(starts, (0, 1), value=B * T).to(torch.int32)


def documents_of(x_BTD: Tensor, docs: Documents | None) -> Documents:
    """Return `docs`, or documents of one per row of `x_BTD` when it is None."""
    return docs if docs is not None else Documents.rows(*x_BTD.shape[:2], device=x_BTD.device)
