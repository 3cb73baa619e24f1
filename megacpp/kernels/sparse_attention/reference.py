"""Attention to the keys that were chosen for each query, block by block over queries.

Legend: B rows, T query tokens, S key tokens, C chosen keys of a query, N query heads, K key/value
heads, G = N / K query heads that share one, H query/key head dim, V value head dim. Within a block
T and S are its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.attention.softcap import (
    BLOCK,
    block_gradients,
    block_logits,
    block_starts,
    rows_times,
)
from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable, wide


def sparse_attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    chosen_BTC: Tensor,
    queries: Documents,
    keys: Documents,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return the softmax over chosen keys times their values, in fp32 or wider: `[B, T, N, V]`.

    The products are those of dense attention; a query's other keys are masked in its block. Keeps
    q, k, v, the choice, the output and one number per query and head: backward makes the logits of
    a block again, and nothing of size `[T, S]` outlives a block.

    Args:
        chosen_BTC: int32 numbers of keys in S, -1 in unused slots (`choose_keys`); at least one
            of each query, none twice.
        queries, keys: what the choice was made for; the same object: later keys are skipped.
    """
    q_BKTGH = q_BTNH.unflatten(2, (k_BSKH.shape[2], -1)).transpose(1, 2)
    k_BKSH, v_BKSV = k_BSKH.transpose(1, 2), v_BSKV.transpose(1, 2)
    with torch.autocast(q_BTNH.device.type, enabled=False):
        o_BKTGV = _SparseAttention.apply(
            q_BKTGH, k_BKSH, v_BKSV, chosen_BTC, scale, softcap, queries is keys
        )
    assert isinstance(o_BKTGV, Tensor)
    return o_BKTGV.transpose(1, 2).flatten(2, 3)


def chosen_mask(chosen_BTC: Tensor, num_keys: int) -> Tensor:
    """Return bool `[B, T, S]`, True at chosen keys; unused slots (-1) choose none, branch-free."""
    shape = (*chosen_BTC.shape[:-1], num_keys + 1)
    place_BTC = chosen_BTC.to(torch.int64).add_(1)  # unused ones go to a column in front, cut off
    mask = torch.zeros(shape, dtype=torch.bool, device=chosen_BTC.device)
    return mask.scatter_(-1, place_BTC, True)[..., 1:]


class _SparseAttention(torch.autograd.Function):
    """Autograd function as `_SoftcapAttention`, with block masks made from the choice."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *settings: Any
    ) -> Tensor:
        scale, softcap, causal = settings
        o_BKTGV = q.new_empty(*q.transpose(1, 2).shape[:-1], v.shape[-1]).transpose(1, 2)
        lse_BKTG1 = wide(q.new_empty(*q.shape[:-1], 1))
        for rows, cols, allowed in _blocks(chosen, k.shape[2], causal):
            logits_BKTGS = block_logits(q[:, :, rows], k[:, :, cols], allowed, scale, softcap)[1]
            top_BKTG1 = logits_BKTGS.amax(-1, keepdim=True)
            weight_BKTGS = logits_BKTGS.sub_(top_BKTG1).exp_()
            total_BKTG1 = weight_BKTGS.sum(-1, keepdim=True)
            o_BKTGV[:, :, rows] = rows_times(weight_BKTGS, v[:, :, cols]) / total_BKTG1
            lse_BKTG1[:, :, rows] = top_BKTG1 + total_BKTG1.log()
            del logits_BKTGS, weight_BKTGS  # before the next block's are made
        ctx.save_for_backward(q, k, v, chosen, o_BKTGV, lse_BKTG1)
        ctx.settings = settings
        return o_BKTGV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BKTGV: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(do_BKTGV.device.type, enabled=False):
            return (*_gradients(ctx, do_BKTGV), None, None, None, None)


def _gradients(ctx: Any, do_BKTGV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, block by block."""
    q, k, v, chosen, o_BKTGV, lse_BKTG1 = ctx.saved_tensors
    scale, softcap, causal = ctx.settings
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(wide(k)), torch.zeros_like(wide(v))
    mean_BKTG1 = (wide(do_BKTGV) * wide(o_BKTGV)).sum(-1, keepdim=True)  # sum p dp
    for rows, cols, allowed in _blocks(chosen, k.shape[2], causal):
        parts = q[:, :, rows], k[:, :, cols], v[:, :, cols], do_BKTGV[:, :, rows]
        of_rows = lse_BKTG1[:, :, rows], mean_BKTG1[:, :, rows]
        into = dk[:, :, cols], dv[:, :, cols]
        dq[:, :, rows] = block_gradients(*parts, *of_rows, *into, allowed, scale, softcap)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(
    chosen_BTC: Tensor, num_keys: int, causal: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Query slice, key slice and mask `[B, 1, T, 1, S]` of each block."""
    tokens = chosen_BTC.shape[1]
    for start in block_starts(tokens):
        stop = min(start + BLOCK, tokens)
        end = stop if causal else num_keys
        mask_BTS = chosen_mask(chosen_BTC[:, start:stop], end)
        yield slice(start, stop), slice(end), mask_BTS[:, None, :, None]
