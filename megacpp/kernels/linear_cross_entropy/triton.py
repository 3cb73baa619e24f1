"""Triton kernels that go over a chunk of logits: statistics, and the gradient in place.

Beside the chunk's own product, in its own dtype, nothing of its size is made: the torch form has a
copy in fp32, with a soft cap a second one, and a dozen elementwise passes over them. All
numbers inside the kernels are fp32 (of fp64 logits fp64); the gradient is rounded once.

    statistics    max, Σ exp(l - max) and the target's l, of l = cap tanh(product / cap)
    gradient      weight ((1 + 2 z lse) softmax - onehot) slope of the cap

One kernel does both where the whole vocabulary is here: a program goes over its row twice, and the
second time the row comes from the cache. Between shards of a vocabulary, ranks exchange statistics.

Sources: online softmax (arXiv 1805.02867), gradients in the forward (Liger, arXiv 2410.10989).

Legend: D model, n tokens of a chunk, v words of a vocabulary shard, K words of a list.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp.kernels.linear_cross_entropy.chunked import (
    IGNORED,
    ShardStatistics,
    Terms,
    VocabularyShard,
)
from megacpp.kernels.strides import launch

BLOCK = 4096  # words at a time: 16 numbers for each thread of 8 warps
NUM_WARPS = 8
# Of a program for a whole row: two fill a multiprocessor, so that 264 rows of an H100 are open at a
# time, 35 MB of its 50 MB of cache with 65,536 words in bf16.
ROW_BLOCK = 8192  # 8 numbers for each thread
ROW_WARPS = 32
LOWEST = tl.constexpr(-3.0e38)  # finite: a block of -inf alone mustn't make NaN


def chunk(
    x_nD: Tensor, w_vD: Tensor, target_n: Tensor, weight_n: Tensor | None, terms: Terms, want: bool
) -> tuple[ShardStatistics, Tensor | None]:
    """Compute a chunk (`ChunkFunction` of chunked.py); the product becomes the gradient in place.

    Args:
        x_nD: hidden states, `[n, D]`.
        w_vD: words, `[v, D]`.
        target_n: `[n]`, words of the whole vocabulary.
        weight_n: factors of the tokens' losses, `[n]`; None: 1.
        terms: of the loss.
        want: return the gradient of the logits.
    """
    logits_nv = x_nD @ w_vD.T
    target_n = target_n.contiguous()
    if want and terms.shard is None:
        return softmax_(logits_nv, target_n, weight_n, terms), logits_nv
    whole = terms.merged(statistics(logits_nv, target_n, terms.first, terms.softcap))
    if want:
        gradient_(logits_nv, target_n, weight_n, whole, terms)
    return whole, logits_nv if want else None


def list_chunk(
    x_nD: Tensor,
    w_vD: Tensor,
    words_nK: Tensor,
    share_nK: Tensor,
    has_n: Tensor,
    shard: VocabularyShard | None,
    want: bool,
) -> tuple[ShardStatistics, Tensor | None]:
    """Compute a chunk (`ListFunction` of token_order.py): softmax by Triton, lists by torch.

    In a narrow dtype the gradient of a word ahead is rounded twice: as softmax, and less its share.

    Args:
        x_nD: hidden states, `[n, D]`.
        w_vD: words, `[v, D]`.
        words_nK: words ahead of each token, `[n, K]`.
        share_nK: target probability of each, `[n, K]`; 0: not in this shard.
        has_n: bool `[n]`, tokens with anything ahead.
        shard: words here; None: all.
        want: return the gradient of the logits.
    """
    logits_nv = x_nD @ w_vD.T
    nowhere_n = torch.where(has_n, -1, IGNORED)  # -1: a token that counts, of no single word
    correct_n = logits_nv.gather(1, words_nK).to(share_nK.dtype).mul_(share_nK).sum(1)
    terms, at_once = Terms(None, 0.0, None), want and shard is None
    if at_once:
        own = softmax_(logits_nv, nowhere_n, None, terms)
    else:
        own = statistics(logits_nv, nowhere_n)
    own = own._replace(correct_N=correct_n)
    whole = own if shard is None else shard.merge(own)
    if not want:
        return whole, None
    if not at_once:
        gradient_(logits_nv, nowhere_n, None, whole, terms)
    return whole, logits_nv.scatter_add_(1, words_nK, share_nK.neg_().to(logits_nv.dtype))


def statistics(
    logits_nv: Tensor, target_n: Tensor, first: int = 0, softcap: float | None = None
) -> ShardStatistics:
    """Return statistics of each token over the words `[first, first + v)`, in at least fp32.

    `correct_N` is 0 where the target isn't one of these words.

    Args:
        logits_nv: `[n, v]`, before their soft cap.
        target_n: `[n]`, words of the whole vocabulary.
        first: number of the first word.
        softcap: None: none.
    """
    return _rows(logits_nv, target_n, None, first, Terms(softcap, 0.0, None), want=False)


def softmax_(
    logits_nv: Tensor, target_n: Tensor, weight_n: Tensor | None, terms: Terms
) -> ShardStatistics:
    """Return `statistics` of all words; logits become their `gradient_` in the same kernel.

    Args:
        logits_nv: `[n, v]`, before their soft cap; overwritten.
        target_n: `[n]`, words.
        weight_n: factors of the tokens' losses, `[n]`; None: 1.
        terms: of the loss, without a shard.
    """
    return _rows(logits_nv, target_n, weight_n, 0, terms, want=True)


def _rows(
    logits_nv: Tensor,
    target_n: Tensor,
    weight_n: Tensor | None,
    first: int,
    terms: Terms,
    want: bool,
) -> ShardStatistics:
    n = len(logits_nv)
    wide = torch.promote_types(logits_nv.dtype, torch.float32)
    out_3n = torch.empty(3, n, dtype=wide, device=logits_nv.device)
    constants = _constants(logits_nv, weight_n, terms, ROW_BLOCK, ROW_WARPS)
    constants.update(WANT=want)
    factors_n = target_n if weight_n is None else weight_n.contiguous()
    launch(_rows_kernel, (n,), logits_nv, target_n, factors_n, out_3n, n, first, **constants)
    return ShardStatistics(*out_3n)


def gradient_(
    logits_nv: Tensor,
    target_n: Tensor,
    weight_n: Tensor | None,
    whole: ShardStatistics,
    terms: Terms,
) -> None:
    """Replace logits by the gradient of the loss by them, before their soft cap.

    Args:
        logits_nv: `[n, v]`; overwritten.
        target_n: `[n]`, words of the whole vocabulary.
        weight_n: factors of the tokens' losses, `[n]`; None: 1.
        whole: statistics over the words of all shards.
        terms: of the loss.
    """
    n, v = logits_nv.shape
    constants = _constants(logits_nv, weight_n, terms, BLOCK, NUM_WARPS)
    factors_n = target_n if weight_n is None else weight_n.contiguous()
    given = logits_nv, target_n, factors_n, whole.max_N.contiguous(), whole.sumexp_N.contiguous()
    grid = n, triton.cdiv(v, constants["BLOCK"])
    launch(_gradient_kernel, grid, *given, terms.first, **constants)


def _constants(
    logits_nv: Tensor, weight_n: Tensor | None, terms: Terms, block: int, warps: int
) -> dict[str, Any]:
    """Return the constants that a kernel is compiled for."""
    assert logits_nv.is_contiguous()
    v = logits_nv.shape[1]
    return {
        "V": v,
        "CAP": terms.softcap or 0.0,
        "Z_LOSS": terms.z_loss,
        "IGNORE": IGNORED,
        "WEIGHTED": weight_n is not None,
        "WIDE": tl.float64 if logits_nv.dtype == torch.float64 else tl.float32,
        "BLOCK": min(block, triton.next_power_of_2(v)),
        "num_warps": warps,
    }


@triton.jit
def _tanh(x):
    """Compute tanh from `exp`, absolute error about 2^-23: `libdevice` isn't portable."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _count(
    target, row, weight_ptr, IGNORE: tl.constexpr, WEIGHTED: tl.constexpr, WIDE: tl.constexpr
):
    """Return the factor of a token's loss; 0 if it is ignored."""
    count = tl.where(target == IGNORE, 0.0, 1.0).to(WIDE)
    if WEIGHTED:
        count *= tl.load(weight_ptr + row).to(WIDE)
    return count


@triton.jit
def _gradient(logits, hits, count, top, total, CAP: tl.constexpr, Z_LOSS: tl.constexpr):
    """Return the gradient of a block of a token's logits, of which `hits` marks the target."""
    factor = count / total
    if Z_LOSS > 0:
        factor *= 1.0 + 2.0 * Z_LOSS * (top + tl.log(total))
    if CAP > 0:
        t = _tanh(logits / CAP)
        g = factor * tl.exp(CAP * t - top) - tl.where(hits, count, 0.0)
        return g * (1.0 - t * t)
    else:
        return factor * tl.exp(logits - top) - tl.where(hits, count, 0.0)


@triton.jit
def _rows_kernel(
    logits_ptr, target_ptr, weight_ptr, out_ptr, n, first,
    V: tl.constexpr, CAP: tl.constexpr, Z_LOSS: tl.constexpr, IGNORE: tl.constexpr,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr, WANT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one token and, if wanted, its gradient; a program per token."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    top = tl.full((), LOWEST, WIDE)
    total = tl.full((), 0.0, WIDE)
    for start in range(0, V, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = words < V
        logits = tl.load(logits_ptr + words, mask=inside, other=0.0).to(WIDE)
        if CAP > 0:
            logits = CAP * _tanh(logits / CAP)
        logits = tl.where(inside, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher), 0)
        top = higher
    target = tl.load(target_ptr + row)
    local = target - first
    here = (local >= 0) & (local < V)
    correct = tl.load(logits_ptr + local, mask=here, other=0.0).to(WIDE)
    if CAP > 0:
        correct = CAP * _tanh(correct / CAP)
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + n + row, total)
    tl.store(out_ptr + 2 * n + row, correct)
    if WANT:
        tl.debug_barrier()  # all threads have read the target's logit
        count = _count(target, row, weight_ptr, IGNORE, WEIGHTED, WIDE)
        for start in range(0, V, BLOCK):
            words = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + words, mask=words < V, other=0.0).to(WIDE)
            g = _gradient(logits, words == local, count, top, total, CAP, Z_LOSS)
            tl.store(logits_ptr + words, g.to(logits_ptr.dtype.element_ty), mask=words < V)


@triton.jit
def _gradient_kernel(
    logits_ptr, target_ptr, weight_ptr, max_ptr, sumexp_ptr, first,
    V: tl.constexpr, CAP: tl.constexpr, Z_LOSS: tl.constexpr, IGNORE: tl.constexpr,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one token and block of words; a program for each."""
    row = tl.program_id(0)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits_ptr + row.to(tl.int64) * V + words
    target = tl.load(target_ptr + row)
    count = _count(target, row, weight_ptr, IGNORE, WEIGHTED, WIDE)
    top, total = tl.load(max_ptr + row), tl.load(sumexp_ptr + row)
    logits = tl.load(place, mask=words < V, other=0.0).to(WIDE)
    g = _gradient(logits, words == target - first, count, top, total, CAP, Z_LOSS)
    tl.store(place, g.to(logits_ptr.dtype.element_ty), mask=words < V)
