"""M2RNN recurrence over whole rows, or over parts of rows, by a backend of `m2rnn`.

`Sequences` says where the state of packed documents restarts, forward and backward.

Legend: as megacpp/kernels/m2rnn/reference.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megacpp.kernels.m2rnn.chunks import Chunked, ChunkPlan, StateClip, heads_and_dtype
from megacpp.torch_extras import no_autocast

if TYPE_CHECKING:
    from megacpp.model.documents import Documents


def m2rnn_chunked(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    f_BTN: Tensor,
    w_NVV: Tensor,
    docs: Documents | None = None,
    initial_SNKV: Tensor | None = None,
    clip: StateClip | None = None,
    chunk_size: int = 64,
    final_states: bool = True,
    keep_states: bool = False,
    by_row: bool = False,
    *,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """Return `m2rnn_sequential` with a hand-derived backward and T / chunk_size saved states.

    The backward gets the inputs and states `[T / chunk_size, N, B, K, V]`, from which it runs each
    chunk again; with `keep_states` states and tanh of every token instead, twice `[T, N, B, K, V]`,
    and nothing is recomputed.

    With `by_row` the tokens are a part of each row, and the states `[B, N, K, V]`, in the
    recurrence's dtype, those on its left and right: the first token of a row sees the one, whatever
    `docs` says. A gradient that arrives for the other meets the clip as if the tokens that it comes
    from were here, so that parts of a row add up to the row.

    Args: as `m2rnn_sequential` (reference.py), and
        chunk_size: tokens of a chunk.
        final_states: return them; with packed documents their number is read from the device.
        keep_states: save states and tanh of every token.
        by_row: states are of rows, not of documents.
        backend: of `m2rnn` (megacpp/kernels/selection.py): `torch`, `triton`, `reference`.
    """
    if backend == "reference":
        assert not by_row
        from megacpp.kernels.m2rnn.reference import m2rnn_sequential

        return m2rnn_sequential(q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV, docs, initial_SNKV, clip)
    seqs = sequences_of(docs, v_BTNV)
    if by_row:
        row_B1 = torch.arange(len(v_BTNV), device=v_BTNV.device)[:, None]
        seqs = replace(seqs, index_BT=row_B1.expand_as(seqs.starts_BT))
    sizes = heads_and_dtype(q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV)
    plan = ChunkPlan(seqs, clip, chunk_size, *sizes, final_states, by_row, keep_states)
    function: type[Function] = Chunked
    if backend == "triton":
        from megacpp.kernels.m2rnn.triton import TritonChunked

        function = TritonChunked
    else:
        assert backend == "torch", backend
    initial_SNKV = initial_SNKV if initial_SNKV is None else initial_SNKV.to(plan.dtype)
    with no_autocast(v_BTNV):
        given = q_BTNK, k_BTNK, v_BTNV, f_BTN[..., None], w_NVV, initial_SNKV, plan
        y_BTNV, *final = function.apply(*given)
    return y_BTNV, final[0] if final else None


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


def anywhere(seqs: Sequences) -> Sequences:
    """Return the sequences of a graph, which serves every batch: one may start at any token."""
    return replace(seqs, entries=range(1, seqs.starts_BT.shape[1])) if seqs.entries else seqs


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
