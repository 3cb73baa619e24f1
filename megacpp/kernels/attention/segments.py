"""Attention of queries to a part of their keys by torch's flash kernels, and its log-sum-exp.

Parts of a row that context ranks pass on are merged by the log-sum-exp, one number per query and
head (megacpp/kernels/attention/parts.py). Documents are segments of the flattened tokens, the i-th
of the queries for the i-th of the keys: no mask, and no work where a part has none of a document.

torch's `varlen_attn` calls the same operators, but the backward of a part needs the log-sum-exp and
the output of all parts. What the kernels take: see varlen.py; a window has no place here, because
it ends at another distance in every part. Nothing waits for the device.

Legend: B rows, T query tokens, S key tokens, N query heads, K key/value heads, H query/key head
dim, V value head dim, X the larger of the two, P tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.model.documents import Documents

OPERATORS = torch.ops.aten


@dataclass(frozen=True)
class Segments:
    """Boundaries of the segments of queries and of keys, int32 `[0, ..., B T]` and `[0, ..., B S]`.

    Attributes:
        queries: of the flattened queries.
        keys: of the flattened keys, as many.
        causal: queries and keys are the same tokens, and none sees a later one.
    """

    queries: Tensor
    keys: Tensor
    causal: bool


def own_segments(row: Documents, start: int, size: int) -> Segments:
    """Return segments of the tokens `[start, start + size)` of every row, each its documents.

    Args:
        row: documents of whole rows.
        start: first token of a row.
        size: tokens of a row.
    """
    ends, (B, T) = row.cu_seqlens, row.ids_BT.shape
    if row.whole:
        ends = torch.arange(B + 1, dtype=torch.int32, device=ends.device) * size
    else:
        ends = ends // T * size + (ends % T - start).clamp(0, size)
    return Segments(ends, ends, True)


def earlier_segments(queries: Documents, keys: Documents) -> Segments:
    """Return segments of tokens and of earlier ones: one document at most has some of both.

    In each row: keys that no query sees, the document's tokens, queries that see no key.

    Args:
        queries: documents of tokens that follow each other in every row.
        keys: documents of tokens that follow each other, all before those of `queries`.
    """
    own_BT, earlier_BS = queries.ids_BT, keys.ids_BT
    num_queries = (own_BT == earlier_BS[:, -1:]).sum(1)
    num_keys = (earlier_BS == own_BT[:, :1]).sum(1)
    none, all_keys = torch.zeros_like(num_queries), torch.full_like(num_keys, keys.ids_BT.shape[1])
    return Segments(
        _flat_ends(torch.stack((none, none, num_queries), 1), own_BT.shape[1]),
        _flat_ends(torch.stack((none, all_keys - num_keys, all_keys), 1), earlier_BS.shape[1]),
        False,
    )


def segment_attention(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention `[B, T, N, V]` and log-sum-exp `[B, T, N]`: 0 and -inf without a key.

    Args:
        q_BTNH: queries.
        k_BSKH: keys, N a multiple of K.
        v_BSKV: values.
        segments: which of them see which.
        scale: factor of q . k.
    """
    B, T, S = *q_BTNH.shape[:2], k_BSKH.shape[1]
    q, k, v = _packed(q_BTNH.dtype, q_BTNH, k_BSKH, v_BSKV)
    ends, causal = (segments.queries, segments.keys), segments.causal
    o_PNX, lse_NP, *_ = OPERATORS._flash_attention_forward(
        q, k, v, *ends, T, S, 0.0, causal, False, scale=scale
    )
    lse_NP = lse_NP.masked_fill(lse_NP == float("inf"), float("-inf"))
    o_BTNX = o_PNX.unflatten(0, (B, T))
    return o_BTNX[..., : v_BSKV.shape[-1]], lse_NP.t().unflatten(0, (B, T))


def segment_gradients(
    do_BTNV: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    o_BTNV: Tensor,
    lse_BTN: Tensor,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one part gives to the gradients of its queries, keys and values.

    Args:
        do_BTNV: gradient of the output.
        q_BTNH: queries.
        k_BSKH: keys of the part.
        v_BSKV: values of the part.
        o_BTNV: output over all parts.
        lse_BTN: log-sum-exp over all parts.
        segments: which queries see which keys of the part.
        scale: factor of q . k.
    """
    (B, T), S = q_BTNH.shape[:2], k_BSKH.shape[1]
    do, q, k, v, o = _packed(q_BTNH.dtype, do_BTNV, q_BTNH, k_BSKH, v_BSKV, o_BTNV)
    lse_NP = lse_BTN.flatten(0, 1).t().contiguous()
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's random numbers
    ends, settings = (segments.queries, segments.keys), (0.0, segments.causal, unused, unused)
    dq, dk, dv = OPERATORS._flash_attention_backward(
        do, q, k, v, o, lse_NP, *ends, T, S, *settings, scale=scale
    )
    dq, dk, dv = (d.unflatten(0, (B, n)) for d, n in ((dq, T), (dk, S), (dv, S)))
    dims = q_BTNH.shape[-1], v_BSKV.shape[-1]
    return dq[..., : dims[0]], dk[..., : dims[0]], dv[..., : dims[1]]


def _flat_ends(starts_BX: Tensor, size: int) -> Tensor:
    """Return int32 boundaries in the flattened rows of `size` tokens, from starts in each row."""
    B = starts_BX.shape[0]
    rows_B1 = torch.arange(B, device=starts_BX.device)[:, None] * size
    return F.pad((starts_BX + rows_B1).flatten(), (0, 1), value=B * size).to(torch.int32)


def _packed(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return each `[B, T, heads, X]` as `[P, heads, widest X]`: zero columns change no score."""
    widest, flat = max(x.shape[-1] for x in tensors), [x.to(dtype).flatten(0, 1) for x in tensors]
    missing = [widest - x.shape[-1] for x in tensors]
    return [F.pad(x, (0, n)) if n else x for x, n in zip(flat, missing, strict=True)]
