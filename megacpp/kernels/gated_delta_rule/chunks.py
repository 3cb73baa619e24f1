"""Gated delta rule chunk by chunk: matrix products and one triangular solve per chunk.

With D_ij the decay from token j to token i of a chunk (0 unless j <= i, in one document), e_i the
decay from the entering state S to token i, and u_i what token i writes under its key:

    (I + strict_lower(diag(beta) K K^T * D)) U = diag(beta) (V - diag(e) K S)
    O = diag(e) Q S + (Q K^T * D) U        S' = e_C S + (diag(D_C) K)^T U

which is the WY form of arXiv 2412.06464 with the entering state inside the solve. Kept for backward
are the inputs alone: backward first runs the states again, then each chunk from last to first.

Legend: B rows, T tokens of a row, H key heads, R value heads of a key head, N = H R value heads, K
key, V value (of the state: X = R V), C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential, unit
from megacpp.kernels.m2rnn.chunks import no_autocast
from megacpp.model.documents import Documents
from megacpp.model.fp32 import wide


def gated_delta_rule(
    q_BTHK: Tensor | None,
    k_BTHK: Tensor,
    v_BTNV: Tensor,
    g_BTN: Tensor,
    beta_BTN: Tensor,
    docs: Documents | None = None,
    initial_BNKV: Tensor | None = None,
    chunk_size: int = 64,
    *,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, T, N, V]` in the dtype of `v_BTNV`, and the state behind each row.

    The state is `[B, N, K, V]`, in at least fp32.

    Args:
        q_BTHK: queries before normalisation; None: only the state is wanted, outputs are empty.
        k_BTHK: keys before normalisation.
        v_BTNV: values.
        g_BTN: log decay, at most 0.
        beta_BTN: write strength in [0, 2].
        docs: the state restarts with each document; None: one document per row.
        initial_BNKV: the state that the first document of each row continues from; None: zeros.
            It may be wider than V: nothing is written into its further columns.
        chunk_size: tokens of a chunk; neither T nor documents have to be aligned to it.
        backend: of `gated_delta_rule` (megacpp/kernels/selection.py): `torch`, `fla`, `reference`.
    """
    if backend == "fla":
        from megacpp.kernels.gated_delta_rule.library import library_rule

        return library_rule(q_BTHK, k_BTHK, v_BTNV, g_BTN, beta_BTN, docs, initial_BNKV, chunk_size)
    if backend == "reference":
        q = k_BTHK if q_BTHK is None else q_BTHK
        v = widened(v_BTNV, initial_BNKV)
        return gated_delta_sequential(q, k_BTHK, v, g_BTN, beta_BTN, docs, initial_BNKV)
    assert backend == "torch", backend
    with no_autocast(v_BTNV):
        return _Chunked.apply(  # type: ignore[return-value]
            q_BTHK, k_BTHK, v_BTNV, g_BTN, beta_BTN, initial_BNKV, docs, chunk_size
        )


def widened(v: Tensor, initial_BNKV: Tensor | None) -> Tensor:
    """Values with zeros up to the width of the state."""
    missing = 0 if initial_BNKV is None else initial_BNKV.shape[-1] - v.shape[-1]
    return F.pad(v, (0, missing)) if missing else v


@dataclass(frozen=True, eq=False)
class Visible:
    """Pairs of tokens of one chunk, and tokens and the entering state, in the same document.

    Attributes:
        pairs_B11CC: bool, the column's token is not behind the row's; B is 1 where all rows agree.
        entering_B11C: bool; None: all of them.
    """

    span: slice
    pairs_B11CC: Tensor
    entering_B11C: Tensor | None


Inputs = Sequence[Tensor | None]  # q (or None), k, v, g, beta


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        docs: Documents | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        inputs = q, k, v, g, beta
        ctx.save_for_backward(*inputs, initial)
        ctx.chunks = _chunks(docs, v, chunk_size)
        ctx.set_materialize_grads(False)  # final states are rarely used
        S, o = _first(k, v, initial), v.new_empty(v.shape if q is not None else 0)
        for chunk in ctx.chunks:
            o_chunk, S = _chunk(_part(inputs, chunk), S, chunk)
            if o_chunk is not None:
                o[:, chunk.span] = o_chunk
        return o, _by_value_head(S, v.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial = ctx.saved_tensors
        inputs = None if do is None else q, k, v, g, beta
        with no_autocast(v):
            states = [_first(k, v, initial)]
            for chunk in ctx.chunks[:-1]:
                states.append(_chunk((None, *_part(inputs, chunk)[1:]), states[-1], chunk)[1])
            dS = torch.zeros_like(states[0])
            if dlast is not None:
                dS = _by_key_head(dlast, k.shape[2])
            grads = [None if x is None else torch.zeros_like(x) for x in (q, k, v, g, beta)]
            for chunk in reversed(ctx.chunks):
                found, dS = _chunk_gradients(_part(inputs, chunk), states.pop(), chunk, do, dS)
                for grad, part in zip(grads, found, strict=True):
                    if grad is not None and part is not None:
                        grad[:, chunk.span] = part
        dinitial = None if initial is None else _by_value_head(dS, v.shape[2])
        return *grads, dinitial, None, None


def _chunk_gradients(
    inputs: Inputs, S_BHKX: Tensor, chunk: Visible, do: Tensor | None, dS_BHKX: Tensor
) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of a chunk's inputs and of the state that enters it."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    S_BHKX = S_BHKX.detach().requires_grad_()
    with torch.enable_grad():
        o, S_after = _chunk(leaves, S_BHKX, chunk)
    outputs, given = [S_after], [dS_BHKX]
    if o is not None and do is not None:
        outputs, given = [S_after, o], [dS_BHKX, do[:, chunk.span]]
    wanted = [S_BHKX, *(x for x in leaves if x is not None)]
    dS_BHKX, *found = torch.autograd.grad(outputs, wanted, given)
    rest = iter(found)
    return [None if x is None else next(rest) for x in leaves], dS_BHKX


def _chunk(inputs: Inputs, S_BHKX: Tensor, chunk: Visible) -> tuple[Tensor | None, Tensor]:
    """Return outputs `[B, C, N, V]` of a chunk (None without queries) and the state behind it."""
    q, k, v, g, beta = inputs
    assert k is not None and v is not None and g is not None and beta is not None
    H, N = k.shape[2], v.shape[2]
    width = S_BHKX.shape[-1] * H // N
    v_BHRCV = F.pad(wide(v), (0, width - v.shape[-1])).unflatten(2, (H, -1)).permute(0, 2, 3, 1, 4)
    beta_BHRC1, k_BHCK = _of_heads(beta, H)[..., None], unit(k).transpose(1, 2)
    pairs_BHRCC, enter_BHRC1 = _decays(_of_heads(g, H), chunk)

    def of_state(x_BHCK: Tensor) -> Tensor:
        """Return the entering state's decayed values under keys or queries, `[B, H, R, C, V]`."""
        return (x_BHCK @ S_BHKX).unflatten(-1, (-1, width)).transpose(2, 3) * enter_BHRC1

    erase_BHRCC = beta_BHRC1 * pairs_BHRCC * (k_BHCK @ k_BHCK.mT)[:, :, None]
    u_BHRCV = torch.linalg.solve_triangular(  # the diagonal of `erase` counts as ones
        erase_BHRCC, beta_BHRC1 * (v_BHRCV - of_state(k_BHCK)), upper=False, unitriangular=True
    )
    left_BHCRV = (pairs_BHRCC[..., -1, :, None] * u_BHRCV).transpose(2, 3)
    across_BH1X = enter_BHRC1[..., -1, :].expand(-1, -1, -1, width).flatten(2)[:, :, None]
    S_after_BHKX = across_BH1X * S_BHKX + k_BHCK.mT @ left_BHCRV.flatten(3)
    if q is None:
        return None, S_after_BHKX
    q_BHCK = unit(q).transpose(1, 2) * k.shape[-1] ** -0.5
    scores_BHRCC = pairs_BHRCC * (q_BHCK @ k_BHCK.mT)[:, :, None]
    o_BHRCV = of_state(q_BHCK) + scores_BHRCC @ u_BHRCV
    return o_BHRCV.permute(0, 3, 1, 2, 4).flatten(2, 3).to(v.dtype), S_after_BHKX


def _decays(g_BHRC: Tensor, chunk: Visible) -> tuple[Tensor, Tensor]:
    """Decay from token to token `[B, H, R, C, C]` and from the entering state `[B, H, R, C, 1]`.

    Sums over the tokens in between, not differences of sums from the start of the chunk: those
    cancel where the decay is fast, and exp of one of them alone overflows.
    """
    C = g_BHRC.shape[-1]
    between_BHRCC = g_BHRC[..., None].expand(*g_BHRC.shape, C).tril(-1).cumsum(-2)
    pairs_BHRCC = torch.where(chunk.pairs_B11CC, between_BHRCC, float("-inf")).exp()
    since_BHRC = g_BHRC.cumsum(-1)
    if chunk.entering_B11C is not None:
        since_BHRC = torch.where(chunk.entering_B11C, since_BHRC, float("-inf"))
    return pairs_BHRCC, since_BHRC.exp()[..., None]


def _chunks(docs: Documents | None, like_BTNV: Tensor, chunk_size: int) -> list[Visible]:
    """Return the chunks of a row; with documents, made once for all layers."""
    if docs is None or docs.whole:
        T, device = like_BTNV.shape[1], like_BTNV.device
        C = min(T, chunk_size)
        before_CC = torch.ones(C, C, dtype=torch.bool, device=device).tril()
        return [
            Visible(s, before_CC[: s.stop - s.start, : s.stop - s.start], None)
            for s in _spans(T, chunk_size)
        ]
    return docs.memo(("gated_delta_rule", chunk_size), lambda: _of_documents(docs, chunk_size))


def _of_documents(docs: Documents, chunk_size: int) -> list[Visible]:
    starts_BT = docs.starts_BT.clone()
    starts_BT[:, 0] = False  # the state in front of a row, if there is one, is its first document's
    chunks = []
    for span in _spans(starts_BT.shape[1], chunk_size):
        run_BC = starts_BT[:, span].cumsum(1)
        pairs_BCC = (run_BC[:, :, None] == run_BC[:, None, :]).tril()
        chunks.append(Visible(span, pairs_BCC[:, None, None], (run_BC == 0)[:, None, None]))
    return chunks


def _spans(T: int, chunk_size: int) -> Iterator[slice]:
    return (slice(s, min(s + chunk_size, T)) for s in range(0, T, chunk_size))


def _part(inputs: Inputs, chunk: Visible) -> list[Tensor | None]:
    return [None if x is None else x[:, chunk.span] for x in inputs]


def _first(k_BTHK: Tensor, v_BTNV: Tensor, initial_BNKV: Tensor | None) -> Tensor:
    """State in front of the first chunk."""
    (B, _, N, V), (_, _, H, K) = v_BTNV.shape, k_BTHK.shape
    if initial_BNKV is not None:
        return _by_key_head(wide(initial_BNKV), H)
    return wide(v_BTNV[:, :0]).new_zeros(B, H, K, N // H * V)


def _of_heads(x_BCN: Tensor, H: int) -> Tensor:
    """Return per-head numbers as `[B, H, R, C]`."""
    return wide(x_BCN).mT.unflatten(1, (H, -1))


def _by_key_head(S_BNKV: Tensor, H: int) -> Tensor:
    """States of the value heads of a key head side by side, `[B, H, K, R V]`."""
    return S_BNKV.unflatten(1, (H, -1)).transpose(2, 3).flatten(3)


def _by_value_head(S_BHKX: Tensor, N: int) -> Tensor:
    """Invert `_by_key_head`; contiguous."""
    return (
        S_BHKX.unflatten(3, (N // S_BHKX.shape[1], -1)).transpose(2, 3).flatten(1, 2).contiguous()
    )
