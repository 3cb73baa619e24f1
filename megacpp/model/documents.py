"""Where packed documents start and end in a batch of rows; every mixer stops there.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from megacpp.model.transfer import to_device

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
        tokens_BT: int64 ids of whole rows, where something reads tokens beside its own.
        labels_BT: labels of whole rows, likewise.
        first_BM: int32, where the documents of each whole row start, and T where a row has fewer
            than M: made while the host could still see them (`to`), so that nothing waits later.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    whole: bool = False
    row: Documents | None = None
    index_T: Tensor | None = None
    tokens_BT: Tensor | None = None
    labels_BT: Tensor | None = None
    first_BM: Tensor | None = None

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
        """int32 boundaries of all documents of the flattened batch `[B * T]` (library kernels).

        The start of a row is one too, and in a part of the tokens wherever some are left out.
        Found on the host where the documents came from (`to`): a device would be waited for.
        """
        return self.memo("cu_seqlens", self._cu_seqlens)

    @property
    def segments(self) -> Tensor:
        """int32 boundaries `[0, ..., B * T]` as `cu_seqlens`, with empty documents among them.

        Without waiting for a device, if the rows are whole or came from the host by `to`.
        """
        return self.memo("segments", self._segments)

    def memo(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()` once per batch and key: masks and angles that every layer shares."""
        memo: dict[Hashable, object] = vars(self)["_memo"]
        if key not in memo:
            memo[key] = make()
        return memo[key]  # type: ignore[return-value]

    def note(self, key: Hashable, value: object) -> None:
        """Leaves something for later layers (`noted`); a new value takes the place of an old."""
        vars(self)["_memo"][key] = value

    def noted(self, key: Hashable) -> Any:
        """What an earlier layer left."""
        memo = vars(self)["_memo"]
        assert key in memo, f"no layer before this one noted {key}"
        return memo[key]

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

    def with_tokens(self, tokens_BT: Tensor, labels_BT: Tensor) -> Documents:
        """The same boundaries, and what stands in the rows (of whole rows; nothing is remembered
        of what was)."""
        assert self.row is None, "ids of a part of the tokens"
        return replace(self, tokens_BT=tokens_BT, labels_BT=labels_BT)

    def tokens_beside(self, by: int, fill: int) -> Tensor:
        """`[B, T]`: of each token, the id `by` tokens after it (before it: `by` < 0).

        `fill` where its document has no such token.
        """
        return self._beside("tokens_BT", by, fill)

    def labels_beside(self, by: int, fill: int) -> Tensor:
        """`[B, T]`: of each token, the label `by` tokens after it; `fill` outside its document."""
        return self._beside("labels_BT", by, fill)

    def to(self, device: torch.device | str) -> Documents:
        """The same boundaries on another device."""

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else to_device(x, device)

        there = Documents(
            to_device(self.ids_BT, device),
            to_device(self.positions_BT, device),
            self.whole,
            None if self.row is None else self.row.to(device),
            moved(self.index_T),
            moved(self.tokens_BT),
            moved(self.labels_BT),
            moved(self.first_for(device)),
        )
        if self.ids_BT.device.type == "cpu" != there.ids_BT.device.type:
            there.note("host", self)
        return there

    def first_for(self, device: torch.device | str) -> Tensor | None:
        """`first_BM`, made now if this is the last time that the host sees the documents."""
        leaves = self.ids_BT.device.type == "cpu" and torch.device(device).type != "cpu"
        if not leaves or self.first_BM is not None or self.whole or self.row is not None:
            return self.first_BM
        starts_BT, T = self.starts_BT, self.ids_BT.shape[1]
        place_BT = starts_BT.cumsum(1) - 1
        row_N, token_N = starts_BT.nonzero(as_tuple=True)
        first_BM = torch.full((len(starts_BT), int(place_BT.max()) + 1), T, dtype=torch.int32)
        first_BM[row_N, place_BT[row_N, token_N]] = token_N.to(torch.int32)
        return first_BM

    def _beside(self, what: Literal["tokens_BT", "labels_BT"], by: int, fill: int) -> Tensor:
        row = self if self.row is None else self.row
        values_BT = getattr(row, what)
        assert values_BT is not None, "documents that know no tokens (Documents.with_tokens)"
        found_BT = beside(values_BT, row.ids_BT, by, fill)
        return found_BT if self.index_T is None else found_BT[:, self.index_T]

    def _segments(self) -> Tensor:
        (B, T), device = self.ids_BT.shape, self.ids_BT.device
        if self.whole:
            return torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)
        if self.first_BM is None:
            return self.cu_seqlens
        row_B1 = torch.arange(0, B * T, T, dtype=torch.int32, device=device)[:, None]
        return torch.nn.functional.pad((self.first_BM + row_B1).flatten(), (0, 1), value=B * T)

    def _cu_seqlens(self) -> Tensor:
        host: Documents | None = vars(self)["_memo"].get("host")
        if host is not None:
            return host.cu_seqlens.to(self.ids_BT.device)
        next_BT = self.positions_BT[:, 1:] == self.positions_BT[:, :-1] + 1
        follows_BT = next_BT & (self.ids_BT[:, 1:] == self.ids_BT[:, :-1])
        starts_BT = ~torch.nn.functional.pad(follows_BT, (1, 0), value=False)
        starts = starts_BT.flatten().nonzero().flatten()
        return torch.nn.functional.pad(starts, (0, 1), value=self.ids_BT.numel()).to(torch.int32)


def beside(values_BT: Tensor, documents_BT: Tensor, by: int, fill: int) -> Tensor:
    """Values of whole rows moved `by` tokens to the left, within documents; `fill` elsewhere."""
    if by == 0:
        return values_BT
    moved_BT = torch.full_like(values_BT, fill)
    if abs(by) >= values_BT.shape[1]:
        return moved_BT
    here, there = (slice(None, -by), slice(by, None)) if by > 0 else (slice(-by, None), slice(by))
    same_BT = documents_BT[:, here] == documents_BT[:, there]
    moved_BT[:, here] = torch.where(same_BT, values_BT[:, there], fill)
    return moved_BT


def stacked_first(parts: Sequence[Documents], device: torch.device) -> Tensor | None:
    """`first_BM` of rows of several batches, one below the other; None if one doesn't know it."""
    known = [x for docs in parts if (x := docs.first_for(device)) is not None]
    if len(known) < len(parts):
        return None
    most, T = max(x.shape[1] for x in known), parts[0].ids_BT.shape[1]
    pad = torch.nn.functional.pad
    return torch.cat([pad(x, (0, most - x.shape[1]), value=T) for x in known])


def documents_of(x_BTD: Tensor, docs: Documents | None) -> Documents:
    """`docs`, or one document per row of `x_BTD` when it is None."""
    return (
        docs if docs is not None else Documents.rows(x_BTD.shape[0], x_BTD.shape[1], x_BTD.device)
    )
