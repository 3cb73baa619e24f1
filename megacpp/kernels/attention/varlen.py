"""Attention of packed rows by torch's flash kernels for sequences of varying length.

`torch.nn.attention.varlen.varlen_attn` takes tokens of all rows end to end and the boundaries of
their documents: no mask, no expanded key/value heads, and work for what a document sees alone.

What it takes (torch 2.11 to 2.15; mha_varlen_fwd of torch's flash_attn/flash_api.cpp): bf16 or
fp16, compute capability 8.0 or later, one head dim for queries, keys and values, a multiple of 8
and at most 256, query heads a multiple of key/value heads, any scale, no soft cap.

For backward it keeps q, k, v, the output and one fp32 number per query and head. The order in which
its backward adds up the gradient of q is not fixed unless `torch.use_deterministic_algorithms`.

Later versions of torch would choose cuDNN's kernels by the GPU that is there (2.15: SM90 and SM100,
cuDNN 9.18 or later). Flash is asked for by name, so that a run and its estimate, which may be made
on another machine, agree on the kernel.

Legend: B rows, T tokens, N query heads, K key/value heads, H query/key head dim, V value head dim,
P tokens of all rows (B * T), X the larger of H and V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.model.documents import Documents
from megacpp.torch_extras import autocast_dtype

# From 2.12 torch has an argument for grouped heads; 2.11 takes them without one: the kernel is the
# same. Deleted with the support of 2.11.
HAS_GQA_ARGUMENT = torch.__version__ >= "2.12"


def varlen_attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKV: Tensor, docs: Documents, scale: float
) -> Tensor:
    """Return attention `[B, T, N, V]` within documents of whole rows.

    Head dims that differ get zero columns up to the larger one, which change no score and no value:
    for MLA of 192 and 128 the kernel's products grow from 320 to 384 numbers per query and key (1.2
    times), and value and output are saved with 192 numbers a head.

    Args: as `causal_attention` (causal.py).
    """
    # Imports Dynamo, which takes two seconds.
    from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

    assert docs.row is None, "flash kernels take whole rows"
    B, T, value_dim = *q_BTNH.shape[:2], v_BTKV.shape[-1]
    widest = max(q_BTNH.shape[-1], value_dim)
    q_PNX, k_PKX, v_PKX = (_packed(x, widest) for x in (q_BTNH, k_BTKH, v_BTKV))
    ends = docs.cu_seqlens
    # T is a bound of the longest document that the host knows; later blocks of shorter ones stop
    # at once.
    extra: dict[str, Any] = {}
    if HAS_GQA_ARGUMENT:
        extra["enable_gqa"] = q_PNX.shape[1] != k_PKX.shape[1]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o_PNX = varlen.varlen_attn(
            q_PNX,
            k_PKX,
            v_PKX,
            ends,
            ends,
            T,
            T,
            scale=scale,
            window_size=(docs.window - 1, 0),
            **extra,
        )
    assert isinstance(o_PNX, Tensor)
    return o_PNX.unflatten(0, (B, T))[..., :value_dim]


def _packed(x_BTXH: Tensor, widest: int) -> Tensor:
    """Tokens of all rows `[P, heads, widest]`, in the dtype of a running autocast."""
    x_PXH = x_BTXH.to(autocast_dtype(x_BTXH) or x_BTXH.dtype).flatten(0, 1)
    missing = widest - x_PXH.shape[-1]
    return F.pad(x_PXH, (0, missing)) if missing else x_PXH
