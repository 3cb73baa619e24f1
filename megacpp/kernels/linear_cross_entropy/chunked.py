"""Cross entropy of a linear head without the logits of the whole batch.

Tokens go through in chunks: logits, softmax and both gradients of a chunk are made before the next
one starts, so that three matrix products do forward and backward, and at most one chunk of logits
exists (Liger fused linear cross entropy, arXiv 2410.10989).

Legend: N tokens, D model, V vocabulary, n tokens of a chunk, v words of a vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp.torch_extras import autocast_dtype, once_differentiable, wide

IGNORED = -100
FEWEST_ROWS = 128  # below, the products of a chunk are too thin to run at full speed
GPU_ROWS = 4096  # then reading and writing dW costs 5 % of a chunk's three products on an H200
GPU_CHUNK_BYTES = 2**29  # that the widest copy of a chunk's logits may have on a GPU
ONE_CHUNK = 1.125  # most bytes of all tokens at once, relative to several chunks


class CrossEntropy(NamedTuple):
    """Results of a head for its tokens; `loss_sum` alone is differentiable."""

    loss_sum: Tensor  # Σ over valid tokens of nll + z_loss * lse², at least fp32
    valid_tokens: Tensor  # int64: targets that aren't -100
    nll_sum: Tensor  # Σ over valid tokens of -log p(target), nats
    lse_N: Tensor  # log Σ exp(logits), of ignored tokens too
    nll_N: Tensor  # -log p(target), 0 for ignored tokens


@dataclass(frozen=True)
class VocabularyShard:
    """Words that this process holds, when a head's vocabulary is sharded over several.

    Attributes:
        first: number of the first word here.
        merge: statistics of a chunk of tokens over these words to those over all words; one
            exchange of `[3, n]` numbers with the other processes (parallel/styles.py).
    """

    first: int
    merge: Callable[[ShardStatistics], ShardStatistics]


def linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
    weight_N: Tensor | None = None,
    backend: str = "torch",
) -> CrossEntropy:
    """Sum the cross entropy of `softcap * tanh(x W^T / softcap)`, never materialising `[N, V]`.

    Products run in the dtype of `x` (under autocast: in its dtype), the softmax and the sums in
    fp32 or wider, and the weight gradient is accumulated in fp32 or wider. Gradients are made in
    the forward, rounded, and scaled in place in the backward, which runs once.

    Args:
        x_ND: hidden states.
        weight_VD: words.
        target_N: int64 in [0, V), or -100 to ignore a token. Without a valid token the loss and
            both gradients are exactly 0. The data layer refuses other values.
        softcap: None: none.
        z_loss: coefficient of lse² (PaLM, arXiv 2204.02311).
        chunk: tokens at a time, by default `chunk_rows`.
        shard: `weight_VD` holds only these words of the vocabulary. The loss is that of the whole
            vocabulary; the gradient of `x` is the part that these words contribute.
        weight_N: factors of the tokens' losses in `loss_sum`, at least fp32; without gradient.
        backend: of `cross_entropy`, for a chunk's statistics and gradient.
    """
    if backend == "reference":
        assert shard is None
        from megacpp.kernels.linear_cross_entropy.reference import linear_cross_entropy_plain

        return linear_cross_entropy_plain(x_ND, weight_VD, target_N, softcap, z_loss, weight_N)
    x_ND = x_ND.to(autocast_dtype(x_ND) or x_ND.dtype)
    rows = chunk or chunk_rows(x_ND, weight_VD, backend)
    grad = torch.is_grad_enabled()  # inside the function it is always off
    how = Terms(softcap, z_loss, shard), rows, grad, chunk_function(backend)
    with torch.autocast(x_ND.device.type, enabled=False):
        out = _LinearCrossEntropy.apply(x_ND, weight_VD, target_N, weight_N, how)
    return CrossEntropy(*out)


def chunk_rows(x_ND: Tensor, weight_VD: Tensor, backend: str = "torch") -> int:
    """Tokens of a chunk such that its logits hold about as many numbers as `x_ND`.

    The power of two at or above N D / V, so that memory doesn't grow with V, but at least 128: on a
    CPU, 64 rows cost 1.3 times the time of 128 and more than 256 gain 5 % at most (D 256, V 4096).
    On a GPU at least `GPU_ROWS`, or as many as `GPU_CHUNK_BYTES` allow: each chunk reads the weight
    twice, and reads and writes its gradient. One chunk needs no wide sum of the weight's gradient,
    so all tokens go at once if that takes about the same memory.

    Args:
        x_ND: hidden states.
        weight_VD: words.
        backend: as in `linear_cross_entropy`; torch makes logits of at least fp32, Triton doesn't.
    """
    wanted = max(FEWEST_ROWS, -(-x_ND.numel() // len(weight_VD)))
    if x_ND.is_cuda:
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        dtype = x_ND.dtype if backend == "triton" else wide
        most = max(1, GPU_CHUNK_BYTES // (len(weight_VD) * dtype.itemsize))
        wanted = max(wanted, min(GPU_ROWS, 1 << (most.bit_length() - 1)))
        if dtype == weight_VD.dtype == torch.bfloat16:
            # In 2 V bytes: all logits and a narrow gradient, or a chunk's and a wide one, rounded.
            N, D = x_ND.shape
            if ONE_CHUNK * (2 * D + max(D, wanted)) >= N + D:
                wanted = N
    return min(max(1, len(x_ND)), 1 << (wanted - 1).bit_length())


def token_spans(tokens: int, rows: int) -> list[slice]:
    """Return chunks of `rows` tokens; no token is one empty chunk, which sets dW."""
    return [slice(start, start + rows) for start in range(0, max(1, tokens), rows)]


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(logits / cap)`, or the logits, of any shape `[...]`, without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


class ShardStatistics(NamedTuple):
    """Statistics of a shard of the vocabulary for each token; enough for the whole softmax."""

    max_N: Tensor
    sumexp_N: Tensor  # Σ exp(logit - max)
    correct_N: Tensor  # logit of the target, 0 where another shard holds it

    @property
    def lse_N(self) -> Tensor:
        """Log of Σ exp(logits) of this shard."""
        return self.max_N + self.sumexp_N.log()


def join_chunks(chunks: Sequence[ShardStatistics]) -> ShardStatistics:
    """Return statistics of all tokens from those of at least one chunk, in their order."""
    return ShardStatistics(*(torch.cat(column) for column in zip(*chunks, strict=True)))


def merge_statistics(shards: Sequence[ShardStatistics]) -> ShardStatistics:
    """Return statistics of the joint vocabulary: a MAX, then sums relative to it."""
    max_N = torch.stack([shard.max_N for shard in shards]).amax(0)
    sums = [shard.sumexp_N * torch.exp(shard.max_N - max_N) for shard in shards]
    correct_N = torch.stack([shard.correct_N for shard in shards]).sum(0)
    return ShardStatistics(max_N, torch.stack(sums).sum(0), correct_N)


@dataclass(frozen=True)
class Terms:
    """Terms of a token's loss: arguments of `linear_cross_entropy`."""

    softcap: float | None
    z_loss: float
    shard: VocabularyShard | None

    @property
    def first(self) -> int:
        """Number of the first word here."""
        return 0 if self.shard is None else self.shard.first

    def merged(self, own: ShardStatistics) -> ShardStatistics:
        """Statistics over the words of all shards."""
        return own if self.shard is None else self.shard.merge(own)


# Of x `[n, D]`, words `[v, D]`, targets `[n]`, factors `[n]`, terms, and whether a gradient of the
# logits is wanted: statistics of n tokens over all words, and that gradient.
ChunkFunction = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Terms, bool], tuple[ShardStatistics, Tensor | None]
]


def chunk_function(backend: str) -> ChunkFunction:
    """Return the function that computes a chunk of logits, by the backend's name."""
    if backend == "triton":
        from megacpp.kernels.linear_cross_entropy.triton import chunk

        return chunk
    assert backend == "torch", backend
    return _chunk


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        weight_N: Tensor | None,
        how: tuple[Terms, int, bool, ChunkFunction],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        terms, rows, grad, go_over = how
        want_x, want_weight = (grad and needed for needed in ctx.needs_input_grad[:2])
        w_VD = weight_VD.to(x_ND.dtype)
        dx_ND = torch.empty_like(x_ND) if want_x else None
        parts, chunks = token_spans(len(x_ND), rows), []
        dw_VD = weight_sum(weight_VD, x_ND, len(parts)) if want_weight else None
        for part in parts:
            weight_n = None if weight_N is None else weight_N[part]
            x_nD, want = x_ND[part], want_x or want_weight
            found, g_nV = go_over(x_nD, w_VD, target_N[part], weight_n, terms, want)
            chunks.append(found)
            if g_nV is not None:
                if dx_ND is not None:
                    torch.mm(g_nV, w_VD, out=dx_ND[part])
                if dw_VD is not None:
                    accumulate(dw_VD, g_nV, x_nD, first=part.start == 0)
            del g_nV  # before the next chunk is made: one at a time
        if dw_VD is not None and weight_VD.dtype != torch.float16:
            dw_VD = dw_VD.to(weight_VD.dtype)  # in fp16 a sum may overflow until it is scaled
        ctx.save_for_backward(dx_ND, dw_VD)
        joined = join_chunks(chunks)
        valid_N, lse_N = target_N != IGNORED, joined.lse_N
        nll_N = torch.where(valid_N, lse_N - joined.correct_N, 0)
        nll_sum = nll_N.sum()
        # an output of its own for autograd
        loss_sum = nll_sum.clone() if weight_N is None else (nll_N * weight_N).sum()
        if terms.z_loss:
            counts_N = valid_N if weight_N is None else valid_N * weight_N
            loss_sum += terms.z_loss * (lse_N.square() * counts_N).sum()
        out = loss_sum, valid_N.sum(), nll_sum, lse_N, nll_N
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        for grad in grads:
            # In place: no second [V, D]. A second backward is refused by the version counter.
            # Looking at the value would make a GPU wait, so only the CPU skips a factor of 1.
            if grad is not None and (scale.device.type != "cpu" or scale.item() != 1.0):
                grad.mul_(scale)
        return *grads, None, None, None


def _chunk(
    x_nD: Tensor, w_vD: Tensor, target_n: Tensor, weight_n: Tensor | None, terms: Terms, want: bool
) -> tuple[ShardStatistics, Tensor | None]:
    """Compute a chunk by torch operators, on logits of at least fp32 (`ChunkFunction`)."""
    valid_n, local_n = target_n != IGNORED, target_n - terms.first
    here_n = valid_n
    if terms.shard is not None:
        here_n = valid_n & (local_n >= 0) & (local_n < len(w_vD))
    index_n = torch.where(here_n, local_n, 0)
    logits_nV, slope_nV = _logits(x_nD, w_vD, terms.softcap, want)
    own = exponentiate(logits_nV, index_n, here_n)
    whole = terms.merged(own)
    if not want:
        return whole, None
    if weight_n is not None:
        valid_n, here_n = valid_n * weight_n, here_n * weight_n
    factor_n = valid_n * (1 + 2 * terms.z_loss * whole.lse_N) / whole.sumexp_N
    if terms.shard is not None:
        factor_n = factor_n * (own.max_N - whole.max_N).exp()
    g_nV = _logit_gradient(logits_nV, factor_n, index_n, here_n, slope_nV)
    return whole, g_nV.to(x_nD.dtype)


def _logits(
    x_nD: Tensor, w_VD: Tensor, cap: float | None, want_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Soft-capped logits and, on request, the slope of the cap, 1 - (capped / cap)²."""
    logits_nV = wide(x_nD @ w_VD.T)
    if cap is None:
        return logits_nV, None
    logits_nV.div_(cap).tanh_()
    slope_nV = logits_nV.square().neg_().add_(1) if want_slope else None
    return logits_nV.mul_(cap), slope_nV


def exponentiate(logits_nV: Tensor, index_n: Tensor, here_n: Tensor) -> ShardStatistics:
    """Return statistics of a chunk; `logits_nV` becomes exp(logits - max) in place.

    Args:
        logits_nV: `[n, V]`, at least fp32; overwritten.
        index_n: `[n]`, place of the target among these words.
        here_n: bool `[n]`, whether it is one of them.
    """
    correct_n = torch.where(here_n, logits_nV.gather(1, index_n[:, None])[:, 0], 0)
    max_n = logits_nV.amax(1)
    logits_nV.sub_(max_n[:, None]).exp_()
    return ShardStatistics(max_n, logits_nV.sum(1), correct_n)


def _logit_gradient(
    exp_nV: Tensor, factor_n: Tensor, index_n: Tensor, here_n: Tensor, slope_nV: Tensor | None
) -> Tensor:
    """Compute (factor * exp - onehot(target, if here)) * slope in place; ignored: factor 0."""
    g_nV = exp_nV.mul_(factor_n[:, None])
    g_nV.scatter_add_(1, index_n[:, None], -here_n.to(g_nV.dtype)[:, None])
    return g_nV if slope_nV is None else g_nV.mul_(slope_nV)


def weight_sum(weight_VD: Tensor, x_ND: Tensor, chunks: int) -> Tensor:
    """Return memory for the weight's gradient, summed over chunks in fp32 or wider.

    The product of a single chunk is rounded once in any case: its dtype is that of `x_ND`.
    """
    at_once = chunks == 1 and weight_VD.dtype == x_ND.dtype == torch.bfloat16
    dtype = x_ND.dtype if at_once else torch.promote_types(x_ND.dtype, torch.float32)
    return torch.empty_like(weight_VD, dtype=dtype)


def accumulate(dw_VD: Tensor, g_nV: Tensor, x_nD: Tensor, first: bool) -> None:
    """Add g^T x to dw (set it at first) without rounding the product to a narrow type.

    A GPU adds inside the product, which takes narrow matrices and a wide sum.

    Args:
        dw_VD: gradient of the words, `[V, D]`.
        g_nV: gradient of the logits, `[n, V]`.
        x_nD: hidden states, `[n, D]`.
        first: overwrite dw.
    """
    beta = 0 if first else 1
    if g_nV.is_cuda and g_nV.dtype != dw_VD.dtype:
        torch.addmm(dw_VD, g_nV.T, x_nD, beta=beta, out_dtype=dw_VD.dtype, out=dw_VD)
        return
    dw_VD.addmm_(g_nV.to(dw_VD.dtype).T, x_nD.to(dw_VD.dtype), beta=beta)
