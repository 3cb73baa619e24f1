"""Gated delta rule by chunks: one triangular solve for all of them, then the states in turn.

With D_ij the decay from token j to token i of a chunk (0 unless j <= i, in one document), e_i the
decay from the entering state S to token i, and u_i what token i writes under its key:

    A = I + strict_lower(diag(beta) K K^T * D)      W = A^-1 diag(beta e) K    Y = A^-1 diag(beta) V
    U = Y - W S      S' = e_C S + (diag(D_C) K)^T U      O = diag(e) Q S + (Q K^T * D) U

which is the WY form of arXiv 2412.06464. A, W, Y and the scores of all chunks are computed at once;
what remains for a chunk after the other are two products. Kept for backward are the inputs alone:
backward computes the chunks again.

Legend: B rows, T tokens of a row, H key heads, R value heads of a key head, N = H R value heads, K
key, V value, L chunks of a row, C tokens of a chunk, M = B N states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.gated_delta_rule.reference import gated_delta_sequential, unit
from megacpp.model.documents import Documents
from megacpp.torch_extras import no_autocast, once_differentiable, wide


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
        backend: of `gated_delta_rule` (megacpp/kernels/selection.py).
    """
    if backend == "fla":
        from megacpp.kernels.gated_delta_rule.library import library_rule

        return library_rule(q_BTHK, k_BTHK, v_BTNV, g_BTN, beta_BTN, docs, initial_BNKV, chunk_size)
    if backend == "reference":
        q = k_BTHK if q_BTHK is None else q_BTHK
        v = widened(v_BTNV, initial_BNKV)
        return gated_delta_sequential(q, k_BTHK, v, g_BTN, beta_BTN, docs, initial_BNKV)
    if backend == "triton":
        from megacpp.kernels.gated_delta_rule.triton import triton_rule

        v = widened(v_BTNV, initial_BNKV)
        given = q_BTHK, k_BTHK, v, g_BTN, beta_BTN, docs, initial_BNKV, chunk_size
        return triton_rule(*given)
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
    """Pairs of tokens of a chunk, and tokens and the entering state, in the same document.

    Attributes:
        pairs_LB11CC: bool, the column's token is not behind the row's; L and B are 1 where all
            agree.
        entering_LB11C: bool; None: all of them.
    """

    pairs_LB11CC: Tensor
    entering_LB11C: Tensor | None


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
        ctx.save_for_backward(q, k, v, g, beta, initial)
        ctx.chunks = docs, chunk_size
        ctx.set_materialize_grads(False)  # final states are rarely used
        return _rule((q, k, v, g, beta, initial), docs, chunk_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        if do is None:
            saved[0] = None
        leaves = [None if x is None else x.detach().requires_grad_() for x in saved]
        with no_autocast(saved[1]):
            with torch.enable_grad():
                results = _rule(leaves, *ctx.chunks)
            wanted = [x for x in leaves if x is not None]
            given = [(y, dy) for y, dy in zip(results, (do, dlast), strict=True) if dy is not None]
            outputs, gradients = zip(*given, strict=True)
            found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        return *(None if x is None else next(found) for x in leaves), None, None


def _rule(inputs: Inputs, docs: Documents | None, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state, as `gated_delta_rule` does."""
    q, k, v, g, beta, initial = inputs
    assert k is not None and v is not None and g is not None and beta is not None
    (B, T, N, V), (H, K) = v.shape, k.shape[2:]
    C, width = min(T, chunk_size), V if initial is None else initial.shape[-1]
    chunks = _chunks(docs, v, C)
    k_LBHCK = _by_chunk(unit(k), C)
    v_LBHRCV = _by_chunk(F.pad(wide(v), (0, width - V)), C).unflatten(2, (H, -1))
    beta_LBHRC1 = _by_chunk(wide(beta)[..., None], C).unflatten(2, (H, -1))
    pairs, enter = _decays(_by_chunk(wide(g)[..., None], C).unflatten(2, (H, -1))[..., 0], chunks)

    erase_LBHRCC = beta_LBHRC1 * pairs * (k_LBHCK @ k_LBHCK.mT)[:, :, :, None]
    written = beta_LBHRC1 * torch.cat([enter * k_LBHCK[:, :, :, None], v_LBHRCV], -1)
    solved = torch.linalg.solve_triangular(  # the diagonal of `erase` counts as ones
        erase_LBHRCC, written, upper=False, unitriangular=True
    )
    read_LMCK, own_LMCV = (x.flatten(1, 3) for x in solved.split([K, width], -1))
    kept_LMCK = (pairs[..., -1, :, None] * k_LBHCK[:, :, :, None]).flatten(1, 3)
    across_LM11 = enter[..., -1:, :].expand(-1, B, -1, -1, -1, -1).flatten(1, 3)
    S_MKV = _first(v, K, width) if initial is None else wide(initial).flatten(0, 1)
    S_LMKV, u_LMCV, S_MKV = _States.apply(read_LMCK, own_LMCV, kept_LMCK, across_LM11, S_MKV)
    last_BNKV = S_MKV.unflatten(0, (B, N))
    if q is None:
        return v.new_empty(0), last_BNKV
    q_LBHCK = _by_chunk(unit(q) * K**-0.5, C)
    scores_LMCC = (pairs * (q_LBHCK @ k_LBHCK.mT)[:, :, :, None]).flatten(1, 3)
    asked_LMCK = (enter * q_LBHCK[:, :, :, None]).flatten(1, 3)
    o_LMCV = asked_LMCK @ S_LMKV + scores_LMCC @ u_LMCV
    o_BTNV = o_LMCV[..., :V].unflatten(1, (B, N)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :T]
    return o_BTNV.to(v.dtype).contiguous(), last_BNKV


class _States(torch.autograd.Function):
    """Returns the state that enters each chunk, what its tokens write, and the last state."""

    @staticmethod
    def forward(
        ctx: Any, read: Tensor, own: Tensor, kept: Tensor, across: Tensor, S_MKV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        S_LMKV = S_MKV.new_empty(len(own), *S_MKV.shape)
        u_LMCV = torch.empty_like(own)
        for c, S_next in enumerate([*S_LMKV[1:], torch.empty_like(S_MKV)]):
            S_MKV = S_LMKV[c].copy_(S_MKV) if c == 0 else S_MKV
            u_MCV = torch.baddbmm(own[c], read[c], S_MKV, alpha=-1, out=u_LMCV[c])
            S_MKV = torch.baddbmm(across[c] * S_MKV, kept[c].mT, u_MCV, out=S_next)
        ctx.save_for_backward(read, kept, across, S_LMKV, u_LMCV)
        return S_LMKV, u_LMCV, S_MKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dS_LMKV: Tensor, du_LMCV: Tensor, dS_MKV: Tensor) -> tuple[Tensor, ...]:
        read, kept, across, S_LMKV, u_LMCV = ctx.saved_tensors
        after_LMKV = torch.empty_like(S_LMKV)
        du_LMCV, dS_LMKV = du_LMCV.clone(), dS_LMKV.clone()
        for c in reversed(range(len(read))):
            after_LMKV[c] = dS_MKV
            du_LMCV[c].baddbmm_(kept[c], dS_MKV)
            dS_MKV = dS_LMKV[c].addcmul_(across[c], dS_MKV)
            dS_MKV.baddbmm_(read[c].mT, du_LMCV[c], alpha=-1)
        dread = -du_LMCV @ S_LMKV.mT
        dkept = u_LMCV @ after_LMKV.mT
        dacross = (after_LMKV * S_LMKV).sum((-2, -1), keepdim=True)
        return dread, du_LMCV, dkept, dacross, dS_MKV


def _decays(g_LBHRC: Tensor, chunks: Visible) -> tuple[Tensor, Tensor]:
    """Decay from token to token `[L, B, H, R, C, C]` and from the entering state, `[.., C, 1]`.

    Sums over the tokens in between, not differences of sums from the start of the chunk: those
    cancel where the decay is fast, and exp of one of them alone overflows.
    """
    C = g_LBHRC.shape[-1]
    between = g_LBHRC[..., None].expand(*g_LBHRC.shape, C).tril(-1).cumsum(-2)
    pairs = torch.where(chunks.pairs_LB11CC, between, float("-inf")).exp()
    since_LBHRC = g_LBHRC.cumsum(-1)
    if chunks.entering_LB11C is not None:
        since_LBHRC = torch.where(chunks.entering_LB11C, since_LBHRC, float("-inf"))
    return pairs, since_LBHRC.exp()[..., None]


def _chunks(docs: Documents | None, like_BTNV: Tensor, C: int) -> Visible:
    """Return what is visible in the chunks of rows; with documents, made once for all layers."""
    if docs is None or docs.whole:
        pairs_CC = torch.ones(C, C, dtype=torch.bool, device=like_BTNV.device).tril()
        return Visible(pairs_CC[None, None, None, None], None)
    return docs.memo(("gated_delta_rule", C), lambda: _of_documents(docs, C))


def _of_documents(docs: Documents, C: int) -> Visible:
    starts_BT = docs.starts_BT.clone()
    starts_BT[:, 0] = False  # the state in front of a row, if there is one, is its first document's
    starts_BT = F.pad(starts_BT, (0, -starts_BT.shape[1] % C))
    run_LBC = starts_BT.unflatten(1, (-1, C)).transpose(0, 1).cumsum(-1)
    pairs_LBCC = (run_LBC[..., :, None] == run_LBC[..., None, :]).tril()
    return Visible(pairs_LBCC[:, :, None, None], (run_LBC == 0)[:, :, None, None])


def _by_chunk(x_BTNV: Tensor, C: int) -> Tensor:
    """Return `[L, B, N, C, V]`; tokens of zeros, which neither write nor decay, fill the last."""
    missing = -x_BTNV.shape[1] % C
    x_BTNV = F.pad(x_BTNV, (0, 0, 0, 0, 0, missing)) if missing else x_BTNV
    return x_BTNV.unflatten(1, (-1, C)).permute(1, 0, 3, 2, 4)


def _first(v_BTNV: Tensor, K: int, width: int) -> Tensor:
    """State in front of the first chunk."""
    B, _, N, _ = v_BTNV.shape
    return wide(v_BTNV[:0]).new_zeros(B * N, K, width)
