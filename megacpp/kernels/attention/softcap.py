"""Attention with tanh-capped logits, block by block: SDPA has no soft cap.

Legend: B rows, T query tokens, S key tokens, N query heads, K key/value heads, G = N / K query
heads that share one, H query/key head dim, V value head dim. Within a block T and S are its part.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megacpp.torch_extras import once_differentiable, wide

BLOCK = 128  # query tokens at a time


def softcap_attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    scale: float,
    softcap: float,
    mask_B1TS: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return softmax(softcap * tanh(scale q k^T / softcap)) v `[B, T, N, V]`, in fp32.

    Keeps q, k, v, the output and one number per query and head for backward, which computes the
    logits again: as in fused attention, nothing of size `[T, S]` outlives a block.

    Args:
        mask_B1TS: bool, True where a query may look; each query has at least one such key.
        causal: T = S and no query may look at a later key (a mask then says so too); the later
            keys are skipped, which halves the work.
    """
    q_BKTGH = q_BTNH.unflatten(2, (k_BSKH.shape[2], -1)).transpose(1, 2)
    k_BKSH, v_BKSV = k_BSKH.transpose(1, 2), v_BSKV.transpose(1, 2)
    with torch.autocast(q_BTNH.device.type, enabled=False):
        o_BKTGV = _SoftcapAttention.apply(
            q_BKTGH, k_BKSH, v_BKSV, mask_B1TS, scale, softcap, causal
        )
    assert isinstance(o_BKTGV, Tensor)
    return o_BKTGV.transpose(1, 2).flatten(2, 3)


class _SoftcapAttention(torch.autograd.Function):
    """Capped attention that saves log softmax denominators; backward uses p = e^(logit - it)."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale, softcap, causal):  # type: ignore[no-untyped-def, override]
        # Tokens before heads in memory: the output projection then keeps this very tensor.
        o_BKTGV = q.new_empty(*q.transpose(1, 2).shape[:-1], v.shape[-1]).transpose(1, 2)
        lse_BKTG1 = wide(q.new_empty(*q.shape[:-1], 1))
        for rows, keys, allowed in query_blocks(q, k, mask, causal):
            logits_BKTGS = block_logits(q[:, :, rows], k[:, :, keys], allowed, scale, softcap)[1]
            top_BKTG1 = logits_BKTGS.amax(-1, keepdim=True)
            weight_BKTGS = logits_BKTGS.sub_(top_BKTG1).exp_()
            total_BKTG1 = weight_BKTGS.sum(-1, keepdim=True)
            o_BKTGV[:, :, rows] = rows_times(weight_BKTGS, v[:, :, keys]) / total_BKTG1
            lse_BKTG1[:, :, rows] = top_BKTG1 + total_BKTG1.log()
        ctx.save_for_backward(q, k, v, mask, o_BKTGV, lse_BKTG1)
        ctx.settings = (scale, softcap, causal)
        return o_BKTGV

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BKTGV):  # type: ignore[no-untyped-def, override]
        with torch.autocast(do_BKTGV.device.type, enabled=False):
            return (*_gradients(ctx, do_BKTGV), None, None, None, None)


def _gradients(ctx, do_BKTGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of q, k, v, block by block."""
    q, k, v, mask, o_BKTGV, lse_BKTG1 = ctx.saved_tensors
    scale, softcap, causal = ctx.settings
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(wide(k)), torch.zeros_like(wide(v))
    mean_BKTG1 = (wide(do_BKTGV) * wide(o_BKTGV)).sum(-1, keepdim=True)  # sum p dp
    for rows, keys, allowed in query_blocks(q, k, mask, causal):
        parts = q[:, :, rows], k[:, :, keys], v[:, :, keys], do_BKTGV[:, :, rows]
        of_rows = lse_BKTG1[:, :, rows], mean_BKTG1[:, :, rows]
        into = dk[:, :, keys], dv[:, :, keys]
        dq[:, :, rows] = block_gradients(*parts, *of_rows, *into, allowed, scale, softcap)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def block_gradients(
    q_BKTGH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    do_BKTGV: Tensor,
    lse_BKTG1: Tensor,
    mean_BKTG1: Tensor,
    dk_BKSH: Tensor,
    dv_BKSV: Tensor,
    allowed: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return dq of one block; add its gradients to dk and dv.

    d softmax = p (dp - sum p dp), d tanh = 1 - tanh^2.

    Args:
        q_BKTGH: queries.
        k_BKSH: keys.
        v_BKSV: values.
        do_BKTGV: gradient of the outputs.
        lse_BKTG1: log of each softmax denominator, over the keys of all blocks.
        mean_BKTG1: sum p dp, over the keys of all blocks.
        dk_BKSH: gradient of the keys, to which the block's is added.
        dv_BKSV: gradient of the values, likewise.
        allowed: bool, True where a query may look, `[B or 1, 1, T, 1, S]`.
        scale: factor of q . k.
        softcap: cap of the scaled scores; None: none.
    """
    tanh, logits_BKTGS = block_logits(q_BKTGH, k_BKSH, allowed, scale, softcap)
    p_BKTGS = logits_BKTGS.sub_(lse_BKTG1).exp_()
    dv_BKSV += _rows_transposed_times(p_BKTGS, do_BKTGV)
    dz_BKTGS = rows_times(do_BKTGV, v_BKSV.mT).sub_(mean_BKTG1).mul_(p_BKTGS)
    if tanh is not None:
        dz_BKTGS.mul_(tanh.square_().neg_().add_(1.0))
    dz_BKTGS.mul_(scale)
    dk_BKSH += _rows_transposed_times(dz_BKTGS, q_BKTGH)
    return rows_times(dz_BKTGS, k_BKSH)


def block_starts(tokens: int) -> list[int]:
    """Return the first query token of each block."""
    return list(range(0, tokens, BLOCK))


def query_blocks(
    q_BKTGH: Tensor, k_BKSH: Tensor, mask_B1TS: Tensor | None, causal: bool
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield query slice, key slice and mask `[B or 1, 1, T, 1, S]` of each block.

    Args:
        q_BKTGH: queries.
        k_BKSH: keys.
        mask_B1TS: bool, True where a query sees a key; None: by `causal`.
        causal: queries see keys that aren't later (T = S), else all.
    """
    tokens, num_keys = q_BKTGH.shape[2], k_BKSH.shape[2]
    assert tokens == num_keys or not causal
    for start in block_starts(tokens):
        stop = min(start + BLOCK, tokens)
        rows, keys, allowed = slice(start, stop), slice(stop if causal else num_keys), None
        if mask_B1TS is not None:
            allowed = mask_B1TS[:, :, rows, None, keys]
        elif causal:
            key_S = torch.arange(stop, device=q_BKTGH.device)
            allowed = (key_S[start:, None] >= key_S)[None, None, :, None]
        yield rows, keys, allowed


def block_logits(
    q_BKTGH: Tensor, k_BKSH: Tensor, allowed: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor | None, Tensor]:
    """Return tanh(scale q k^T / softcap), and the logits: softcap times it, -inf where masked.

    Without a soft cap: None, and scale q k^T.

    Args:
        q_BKTGH: queries.
        k_BKSH: keys.
        allowed: bool, True where a query may look, `[B or 1, 1, T, 1, S]`; None: everywhere.
        scale: factor of q . k.
        softcap: cap of the scaled scores; None: none.
    """
    tanh, logits_BKTGS = None, rows_times(q_BKTGH, k_BKSH.mT)
    if softcap is None:
        logits_BKTGS.mul_(scale)
    else:
        tanh = logits_BKTGS.mul_(scale / softcap).tanh_()
        logits_BKTGS = tanh * softcap
    if allowed is not None:
        logits_BKTGS.masked_fill_(~allowed, float("-inf"))
    return tanh, logits_BKTGS


def rows_times(x_BKTGI: Tensor, y_BKIJ: Tensor) -> Tensor:
    """Return x y `[B, K, T, G, J]` in fp32, with all (token, head) rows of x in one matrix."""
    return (wide(x_BKTGI).flatten(2, 3) @ wide(y_BKIJ)).unflatten(2, x_BKTGI.shape[2:4])


def _rows_transposed_times(x_BKTGI: Tensor, y_BKTGJ: Tensor) -> Tensor:
    """Return x^T y in fp32, summed over the (token, head) rows: `[B, K, I, J]`."""
    return wide(x_BKTGI).flatten(2, 3).mT @ wide(y_BKTGJ).flatten(2, 3)
