"""Triton kernels that read a chunk of logits twice: statistics, then the gradient in place.

Beside the chunk's own product, in its own dtype, nothing of its size is made: the torch form has a
copy in fp32, with a soft cap a second one, and a dozen elementwise passes over them. All
numbers inside the kernels are fp32 (of fp64 logits fp64); the gradient is rounded once.

    statistics    reads: max, Σ exp(l - max) and the target's l, of l = cap tanh(product / cap)
    gradient      reads and writes: weight ((1 + 2 z lse) softmax - onehot) slope of the cap

Sources: online softmax (arXiv 1805.02867), gradients in the forward (Liger, arXiv 2410.10989).

Legend: D model, n tokens of a chunk, v words of a vocabulary shard, K words of a list.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from megacpp.kernels.linear_cross_entropy.chunked import (
    IGNORED,
    ShardStatistics,
    Terms,
    VocabularyShard,
)

BLOCK = 4096  # words at a time: 16 numbers for each thread of 8 warps
NUM_WARPS = 8
LOWEST = tl.constexpr(-3.0e38)  # finite: a block of -inf alone mustn't make NaN


def chunk(
    x_nD: Tensor,
    w_vD: Tensor,
    target_n: Tensor,
    weight_n: Tensor | None,
    terms: Terms,
    want: bool,
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
    own = statistics(logits_nv, nowhere_n)
    correct_n = logits_nv.gather(1, words_nK).to(share_nK.dtype).mul_(share_nK).sum(1)
    own = own._replace(correct_N=correct_n)
    whole = own if shard is None else shard.merge(own)
    if not want:
        return whole, None
    gradient_(logits_nv, nowhere_n, None, whole, Terms(None, 0.0, None))
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
    n = len(logits_nv)
    wide = torch.promote_types(logits_nv.dtype, torch.float32)
    out_3n = torch.empty(3, n, dtype=wide, device=logits_nv.device)
    constants = _constants(logits_nv, CAP=softcap or 0.0)
    with _device(logits_nv):
        _statistics_kernel[(n,)](logits_nv, target_n, out_3n, n, first, **constants)
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
    constants = _constants(
        logits_nv,
        CAP=terms.softcap or 0.0,
        Z_LOSS=terms.z_loss,
        IGNORE=IGNORED,
        WEIGHTED=weight_n is not None,
    )
    with _device(logits_nv):
        _gradient_kernel[(n, triton.cdiv(v, constants["BLOCK"]))](
            logits_nv,
            target_n,
            whole.max_N.contiguous(),
            whole.sumexp_N.contiguous(),
            target_n if weight_n is None else weight_n.contiguous(),
            terms.first,
            **constants,
        )


def _constants(logits_nv: Tensor, **more: Any) -> dict[str, Any]:
    """Return the constants that a kernel is compiled for."""
    assert logits_nv.is_contiguous()
    if not (logits_nv.is_cuda or knobs.runtime.interpret):
        raise RuntimeError(f"cross entropy: triton has no kernels for {logits_nv.device.type}")
    wide = tl.float64 if logits_nv.dtype == torch.float64 else tl.float32
    block = min(BLOCK, triton.next_power_of_2(logits_nv.shape[1]))
    sizes = {"V": logits_nv.shape[1], "WIDE": wide, "BLOCK": block, "num_warps": NUM_WARPS}
    return sizes | more


def _device(t: Tensor) -> Any:
    """Return a context in which the tensor's device is current: Triton launches there."""
    return torch.cuda.device_of(t)


@triton.jit
def _tanh(x):
    """Compute tanh from `exp`, absolute error about 2^-23: `libdevice` isn't portable."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _statistics_kernel(
    logits_ptr,
    target_ptr,
    out_ptr,
    n,
    first,
    V: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of one token; a program per token."""
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
    local = tl.load(target_ptr + row) - first
    here = (local >= 0) & (local < V)
    correct = tl.load(logits_ptr + local, mask=here, other=0.0).to(WIDE)
    if CAP > 0:
        correct = CAP * _tanh(correct / CAP)
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + n + row, total)
    tl.store(out_ptr + 2 * n + row, correct)


@triton.jit
def _gradient_kernel(
    logits_ptr,
    target_ptr,
    max_ptr,
    sumexp_ptr,
    weight_ptr,
    first,
    V: tl.constexpr,
    CAP: tl.constexpr,
    Z_LOSS: tl.constexpr,
    IGNORE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one token and block of words; a program for each."""
    row = tl.program_id(0)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < V
    place = logits_ptr + row.to(tl.int64) * V + words
    target = tl.load(target_ptr + row)
    top = tl.load(max_ptr + row)
    total = tl.load(sumexp_ptr + row)
    count = tl.where(target == IGNORE, 0.0, 1.0).to(WIDE)
    if WEIGHTED:
        count *= tl.load(weight_ptr + row).to(WIDE)
    factor = count / total
    if Z_LOSS > 0:
        factor *= 1.0 + 2.0 * Z_LOSS * (top + tl.log(total))
    logits = tl.load(place, mask=inside, other=0.0).to(WIDE)
    slope = tl.full((BLOCK,), 1.0, WIDE)
    if CAP > 0:
        t = _tanh(logits / CAP)
        logits = CAP * t
        slope = 1.0 - t * t
    g = factor * tl.exp(logits - top) - tl.where(words == target - first, count, 0.0)
    tl.store(place, (g * slope).to(logits_ptr.dtype.element_ty), mask=inside)
