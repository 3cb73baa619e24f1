"""Token order: which words come sooner, as a loss of a linear head without logits `[N, V]`.

Of each token, the words among the next `window` tokens of its document are ranked by where they
come first: a word that is `a` tokens ahead scores -a, all others -inf. The loss is the cross
entropy between the softmax of these scores and that of the logits (TOP, arXiv 2508.19228, and
ListNet). The softmax of the scores falls by e with every token ahead, so it is a short list of
words for each token, made for one chunk of tokens at a time.

Legend: N tokens, M tokens of whole rows, D model, V vocabulary, K tokens ahead, n tokens of a
chunk, v words of a vocabulary shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megacpp.kernels.linear_cross_entropy.chunked import (
    ShardStatistics,
    VocabularyShard,
    accumulate,
    chunk_rows,
    token_spans,
    weight_sum,
)
from megacpp.torch_extras import autocast_dtype, once_differentiable


@dataclass(frozen=True, eq=False)
class TokensAhead:
    """Tokens that come after each of N tokens, among the M tokens of whole rows, concatenated.

    Attributes:
        ids_M: int64 words.
        before_M: int64, the place of the same word the time before; -1: the first time.
        place_N: int64 places of the N tokens.
        last_N: int64, last place in the document of each of these tokens.
        most: tokens ahead that can count: of the window, and of a row.
    """

    ids_M: Tensor
    before_M: Tensor
    place_N: Tensor
    last_N: Tensor
    most: int

    @staticmethod
    def from_rows(
        ids_BT: Tensor, ends_BT: Tensor, window: int, index_T: Tensor | None = None
    ) -> TokensAhead:
        """Return the tokens ahead in whole rows.

        Args:
            ids_BT: words.
            ends_BT: bool, the last tokens of documents; the last of a row is one.
            window: tokens ahead that count.
            index_T: positions in the row of the N tokens; None: all.
        """
        ids_M, (B, T) = ids_BT.flatten(), ids_BT.shape
        places_M = torch.arange(len(ids_M), device=ids_M.device)
        order_M = ids_M.argsort(stable=True)
        sorted_M = ids_M[order_M]
        again = sorted_M[1:] == sorted_M[:-1]
        before_M = torch.full_like(ids_M, -1)
        before_M[order_M[1:]] = torch.where(again, order_M[:-1], -1)
        ends_M = torch.where(ends_BT.flatten(), places_M, len(ids_M))
        last_M = ends_M.flip(0).cummin(0).values.flip(0)
        if index_T is not None:
            places_M = places_M.view(B, T)[:, index_T].flatten()
            last_M = last_M[places_M]
        return TokensAhead(ids_M, before_M, places_M, last_M, max(1, min(window, T - 1)))

    def targets(self, part: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Words `[n, K]` ahead of some of the tokens, and the target probability of each.

        Only the first of equal words has one, and only if it is in the token's document. A token
        with nothing ahead has none at all; elsewhere they sum to one. Words so far ahead that
        e^(1 - a) is no normal number of `dtype` are left out (fp32: beyond 88, fp64: 709).
        """
        place_n, last_n = self.place_N[part, None], self.last_N[part, None]
        ahead_K = torch.arange(1, 1 + self.reach(dtype), device=place_n.device)
        there_nK = place_n + ahead_K
        inside_nK = there_nK <= last_n
        there_nK.clamp_(max=len(self.ids_M) - 1)
        inside_nK &= self.before_M[there_nK] <= place_n
        share_nK = torch.where(inside_nK, (1 - ahead_K).to(dtype).exp(), 0)
        share_nK.div_(share_nK.sum(1, keepdim=True).clamp(min=1))  # the next token weighs 1
        return self.ids_M[there_nK], share_nK

    def reach(self, dtype: torch.dtype) -> int:
        """Return K, the tokens ahead that count at all."""
        return min(self.most, 1 + math.floor(-math.log(torch.finfo(dtype).tiny)))


def token_order_loss(
    x_ND: Tensor,
    weight_VD: Tensor,
    ahead: TokensAhead,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
    backend: str = "torch",
) -> Tensor:
    """Sum over tokens of -target . log softmax(x W^T), at least fp32; differentiable.

    Everything else is as in `linear_cross_entropy`: products in the dtype of `x` (under autocast
    in its dtype), sums in fp32 or wider, gradients made in the forward, so that backward runs
    once. A token with nothing ahead adds exactly nothing.

    Args:
        chunk: tokens at a time, by default `chunk_rows`.
        shard: `weight_VD` holds only these words. The loss is that of all words; the gradient of
            `x` is the part that these words contribute.
        backend: as in `linear_cross_entropy`.
    """
    device = x_ND.device.type
    x_ND = x_ND.to(autocast_dtype(x_ND) or x_ND.dtype)
    rows = chunk or chunk_rows(x_ND, weight_VD, backend)
    go_over = list_function(backend)
    grad = torch.is_grad_enabled()  # inside the function it is always off
    with torch.autocast(device, enabled=False):
        return _TokenOrderLoss.apply(x_ND, weight_VD, ahead, rows, grad, shard, go_over)  # type: ignore[return-value]


def token_order_loss_plain(x_ND: Tensor, weight_VD: Tensor, target_NV: Tensor) -> Tensor:
    """Return `token_order_loss` from whole scores (-inf: not ahead) and autograd: the reference."""
    logits_NV = F.linear(x_ND, weight_VD)
    share_NV = torch.nan_to_num(target_NV.softmax(1), nan=0.0)
    return -(share_NV * logits_NV.log_softmax(1)).sum()


# Of x `[n, D]`, words `[v, D]`, words ahead and their shares `[n, K]`, tokens that have any `[n]`,
# the shard, and whether the gradient of the logits is wanted: as `ChunkFunction`.
ListFunction = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, VocabularyShard | None, bool],
    tuple[ShardStatistics, Tensor | None],
]


def list_function(backend: str) -> ListFunction:
    """Return the function that computes a chunk of logits, by the backend of `cross_entropy`."""
    if backend == "triton":
        from megacpp.kernels.linear_cross_entropy.triton import list_chunk

        return list_chunk
    assert backend in ("torch", "reference"), backend
    return _list_chunk


class _TokenOrderLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_ND: Tensor,
        weight_VD: Tensor,
        ahead: TokensAhead,
        rows: int,
        grad: bool,
        shard: VocabularyShard | None,
        go_over: ListFunction,
    ) -> Tensor:
        want_x, want_weight = (grad and needed for needed in ctx.needs_input_grad[:2])  # type: ignore[attr-defined]
        w_VD = weight_VD.to(x_ND.dtype)
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        loss_N = torch.empty(len(x_ND), dtype=wide, device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if want_x else None
        parts = token_spans(len(x_ND), rows)
        dw_VD = weight_sum(weight_VD, x_ND, len(parts)) if want_weight else None
        for part in parts:
            words_nK, share_nK = ahead.targets(part, wide)
            has_n = share_nK.sum(1) > 0
            if shard is not None:
                words_nK -= shard.first
                elsewhere_nK = (words_nK < 0) | (words_nK >= len(w_VD))
                words_nK.masked_fill_(elsewhere_nK, 0)
                share_nK.masked_fill_(elsewhere_nK, 0)
            x_nD, want = x_ND[part], want_x or want_weight
            found, g_nV = go_over(x_nD, w_VD, words_nK, share_nK, has_n, shard, want)
            loss_N[part] = torch.where(has_n, found.lse_N - found.correct_N, 0)
            if g_nV is not None:
                if dx_ND is not None:
                    torch.mm(g_nV, w_VD, out=dx_ND[part])
                if dw_VD is not None:
                    accumulate(dw_VD, g_nV, x_nD, first=part.start == 0)
            del g_nV, words_nK, share_nK  # before the next chunk is made: one at a time
        if dw_VD is not None and weight_VD.dtype != torch.float16:
            dw_VD = dw_VD.to(weight_VD.dtype)  # in fp16 a sum may overflow until it is scaled
        ctx.save_for_backward(dx_ND, dw_VD)  # type: ignore[arg-type]
        return loss_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors  # type: ignore[attr-defined]
        for grad in grads:
            if grad is not None:
                grad.mul_(scale)  # in place: no second [V, D]
        return *grads, None, None, None, None, None


def _list_chunk(
    x_nD: Tensor,
    w_vD: Tensor,
    words_nK: Tensor,
    share_nK: Tensor,
    has_n: Tensor,
    shard: VocabularyShard | None,
    want: bool,
) -> tuple[ShardStatistics, Tensor | None]:
    """Compute a chunk by torch operators, on logits of at least fp32 (`ListFunction`)."""
    logits_nV = (x_nD @ w_vD.T).to(share_nK.dtype)
    own = _exponentiate(logits_nV, words_nK, share_nK)
    whole = own if shard is None else shard.merge(own)
    if not want:
        return whole, None
    factor_n = has_n / whole.sumexp_N
    if shard is not None:
        factor_n = factor_n * (own.max_N - whole.max_N).exp()
    g_nV = logits_nV.mul_(factor_n[:, None])
    return whole, g_nV.scatter_add_(1, words_nK, share_nK.neg_()).to(x_nD.dtype)


def _exponentiate(logits_nV: Tensor, words_nK: Tensor, share_nK: Tensor) -> ShardStatistics:
    """Statistics of a chunk; `logits_nV` becomes exp(logits - max) in place."""
    correct_n = logits_nV.gather(1, words_nK).mul_(share_nK).sum(1)
    max_n = logits_nV.amax(1)
    logits_nV.sub_(max_n[:, None]).exp_()
    return ShardStatistics(max_n, logits_nV.sum(1), correct_n)
