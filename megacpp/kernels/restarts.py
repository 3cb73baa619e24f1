"""Restarts of a recurrent state in a batch of packed documents, forward and backward.

Legend: B rows, T tokens of a row, N heads, K key, V value, S sequences: runs of tokens that share
a state, one per document, in the order of the flattened batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megacpp.model.documents import Documents


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of a batch `[B, T]`; the first token of a row always starts one."""

    starts_BT: Tensor  # bool
    index_BT: Tensor  # int64: the sequence of each token
    entries: Collection[int]  # every t > 0 at which a row may start a sequence

    @property
    def ends_BT(self) -> Tensor:
        """Whether each token ends a sequence."""
        return F.pad(self.starts_BT[:, 1:], (0, 1), value=True)

    def enter(self, h_NBKV: Tensor, initial_SNKV: Tensor | None, t: int) -> Tensor:
        """Return the state before token t: initial in rows that start a sequence there."""
        # where, not a product: a NaN of another document times zero would still be a NaN.
        starts_B11 = self.starts_BT[:, t, None, None]
        if initial_SNKV is None:
            return h_NBKV.masked_fill(starts_B11, 0.0)
        begun_NBKV = initial_SNKV[self.index_BT[:, t]].transpose(0, 1)
        return torch.where(starts_B11, begun_NBKV, h_NBKV).contiguous()

    def leave(
        self, dh_NBKV: Tensor, dinitial_SNKV: Tensor | None, dfinal_SNKV: Tensor | None, t: int
    ) -> Tensor:
        """Return the gradient of the state after token t - 1, from that of the state before t.

        Args:
            dh_NBKV: gradient of the state before token t.
            dinitial_SNKV: gradient of the initial states, to which restarting rows add; None: none.
            dfinal_SNKV: gradient of the final states; None: zeros.
            t: token.
        """
        starts_B11 = self.starts_BT[:, t, None, None]
        if dinitial_SNKV is not None:
            begun_NBKV = torch.where(starts_B11, dh_NBKV, 0.0)
            dinitial_SNKV.index_add_(0, self.index_BT[:, t], begun_NBKV.transpose(0, 1))
        if dfinal_SNKV is None:
            return dh_NBKV.masked_fill(starts_B11, 0.0)
        ended_NBKV = dfinal_SNKV[self.index_BT[:, t - 1]].transpose(0, 1)
        return torch.where(starts_B11, ended_NBKV, dh_NBKV).contiguous()


def sequences_of(docs: Documents | None, like_BTNV: Tensor) -> Sequences:
    """Return the sequences of a batch; with documents, made once for all layers."""
    if docs is None:
        return _of_rows(like_BTNV)
    whole = docs.whole
    return docs.memo(
        "sequences", lambda: _of_rows(like_BTNV) if whole else _from_starts(docs.starts_BT)
    )


def _of_rows(like_BTNV: Tensor) -> Sequences:
    (B, T), device = like_BTNV.shape[:2], like_BTNV.device
    starts_T = torch.arange(T, device=device) == 0
    index_B1 = torch.arange(B, device=device)[:, None]
    return Sequences(starts_T.expand(B, T), index_B1.expand(B, T), ())


def _from_starts(starts_BT: Tensor) -> Sequences:
    starts_BT = starts_BT.index_fill(1, starts_BT.new_zeros(1, dtype=torch.int64), True)
    index_BT = starts_BT.flatten().cumsum(0).view_as(starts_BT) - 1
    entries: Collection[int] = range(1, starts_BT.shape[1])
    # A device would have to be waited for, and a subclass (a fake tensor) may hold no values.
    if starts_BT.device.type == "cpu" and type(starts_BT) is Tensor:
        entries = frozenset(starts_BT.any(0).nonzero()[1:, 0].tolist())
    return Sequences(starts_BT, index_BT, entries)
