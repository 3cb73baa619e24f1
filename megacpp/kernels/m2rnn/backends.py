"""M2RNN recurrence over whole rows, and over parts of rows, by a backend of `m2rnn`.

Legend: as megacpp/kernels/m2rnn/reference.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Function

from megacpp.kernels.m2rnn.chunks import Chunked, ChunkPlan, StateClip, heads_and_dtype, no_autocast
from megacpp.kernels.restarts import Sequences, sequences_of

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
    *,
    backend: str = "torch",
) -> tuple[Tensor, Tensor | None]:
    """Return `m2rnn_sequential` with a hand-derived backward and T / chunk_size saved states.

    The backward gets the inputs and states `[T / chunk_size, N, B, K, V]`, from which it runs each
    chunk again; with `keep_states` states and tanh of every token instead, twice `[T, N, B, K, V]`,
    and nothing is recomputed.

    Args: as `m2rnn_sequential` (reference.py), and
        chunk_size: tokens of a chunk.
        final_states: return them; with packed documents their number is read from the device.
        keep_states: save states and tanh of every token.
        backend: of `m2rnn` (megacpp/kernels/selection.py): `torch`, `triton`, `reference`.
    """
    if backend == "reference":
        from megacpp.kernels.m2rnn.reference import m2rnn_sequential

        return m2rnn_sequential(q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV, docs, initial_SNKV, clip)
    num_heads, dtype = heads_and_dtype(q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV)
    plan = ChunkPlan(
        sequences_of(docs, v_BTNV),
        clip,
        chunk_size,
        num_heads,
        dtype,
        final_states,
        keep_states=keep_states,
    )
    initial_SNKV = initial_SNKV.to(dtype) if initial_SNKV is not None else None
    with no_autocast(v_BTNV):
        return _chunks_by(backend).apply(  # type: ignore[return-value]
            q_BTNK, k_BTNK, v_BTNV, f_BTN[..., None], w_NVV, initial_SNKV, plan
        )


def m2rnn_carried(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTNV: Tensor,
    f_BTN: Tensor,
    w_NVV: Tensor,
    docs: Documents,
    entering_BNKV: Tensor,
    clip: StateClip | None = None,
    chunk_size: int = 64,
    keep_states: bool = False,
    *,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return `m2rnn_chunked` of a part of each row, with the states on its left and right.

    The first token of a row sees `entering`, whatever `docs` says. Both states `[B, N, K, V]` have
    the recurrence's dtype. A gradient that arrives for the one that leaves meets the clip as if the
    tokens that it comes from were here, so that parts of a row add up to the row.

    Args: as `m2rnn_chunked`, and
        docs: documents of the part.
        entering_BNKV: state in front of the part.
        backend: `torch` or `triton`.
    """
    num_heads, dtype = heads_and_dtype(q_BTNK, k_BTNK, v_BTNV, f_BTN, w_NVV)
    seqs, row_B = sequences_of(docs, v_BTNV), torch.arange(len(v_BTNV), device=v_BTNV.device)
    seqs = _RowStates(seqs.starts_BT, row_B[:, None].expand_as(seqs.starts_BT), seqs.entries)
    plan = ChunkPlan(seqs, clip, chunk_size, num_heads, dtype, True, True, keep_states)
    with no_autocast(v_BTNV):
        return _chunks_by(backend).apply(  # type: ignore[return-value]
            q_BTNK, k_BTNK, v_BTNV, f_BTN[..., None], w_NVV, entering_BNKV.to(dtype), plan
        )


class _RowStates(Sequences):
    """Sequences where only rows have an initial and a final state: the index is the row's."""

    def enter(self, h_NBKV: Tensor, initial_SNKV: Tensor | None, t: int) -> Tensor:
        return super().enter(h_NBKV, initial_SNKV if t == 0 else None, t)

    def leave(
        self, dh_NBKV: Tensor, dinitial_SNKV: Tensor | None, dfinal_SNKV: Tensor | None, t: int
    ) -> Tensor:
        return super().leave(dh_NBKV, None, None, t)


def _chunks_by(backend: str) -> type[Function]:
    """Return the autograd Function of a backend; all take the arguments of `Chunked`."""
    if backend == "triton":
        from megacpp.kernels.m2rnn.triton import TritonChunked

        return TritonChunked
    assert backend == "torch", backend
    return Chunked
