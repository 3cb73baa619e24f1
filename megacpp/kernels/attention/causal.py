"""Causal attention over packed documents by a backend of `attention`, by its name.

Legend: B rows, T query tokens, S key tokens, N query heads, K key/value heads (N a multiple of
K; query head n reads key/value head n // (N / K)), H query/key head dim, V value head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.attention.softcap import softcap_attention
from megacpp.kernels.attention.varlen import varlen_attention
from megacpp.model.documents import Documents

VARLEN = ("varlen", "varlen_padded")  # flash kernels for whole rows


def causal_attention(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    docs: Documents,
    scale: float,
    softcap: float | None = None,
    backend: str = "torch",
    keys: Documents | None = None,
) -> Tensor:
    """Return attention `[B, T, N, V]` of queries to the keys of their documents that aren't later.

    Queries and keys are those of whole rows, S = T, or with `keys` any tokens of the rows. By
    torch's fused kernels rows of one document need no mask. For packed rows it is made once a
    batch: SDPA would turn a bool mask into an additive one in every layer, and every layer would
    keep its own. Where heads are grouped, masked SDPA on CUDA expands keys and values to all heads.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKV: values.
        docs: documents of the queries.
        scale: factor of q . k.
        softcap: cap of the scaled scores; None: none.
        backend: of `attention` (megacpp/kernels/selection.py); with `keys`, `flex` or `torch`.
        keys: documents of the keys; None: those of the queries.
    """
    if backend == "flex":
        from megacpp.kernels.attention.flex import flex_attention

        return flex_attention(q_BTNH, k_BSKH, v_BSKV, docs, keys or docs, scale, softcap)
    if backend == "torch":
        whole = keys is None and docs.whole and not docs.window
        dtype = q_BTNH.dtype
        mask_B1TS = None if whole else attention_mask(docs, keys or docs, dtype, softcap)
        return attend(q_BTNH, k_BSKH, v_BSKV, scale, softcap, mask_B1TS, causal=keys is None)
    assert keys is None, f"{backend} takes whole rows"
    if backend == "reference":
        from megacpp.kernels.attention.reference import attention_reference

        return attention_reference(q_BTNH, k_BSKH, v_BSKV, docs, scale, softcap)
    assert backend in VARLEN, backend
    assert softcap is None, "flash kernels of torch take no soft cap"
    equal = q_BTNH.shape[-1] == v_BSKV.shape[-1]
    assert equal or backend == "varlen_padded", "head dims that differ: varlen_padded"
    return varlen_attention(q_BTNH, k_BSKH, v_BSKV, docs, scale)


def attend(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    scale: float,
    softcap: float | None = None,
    mask_B1TS: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return attention `[B, T, N, V]` of any queries to any keys: all, or those of a mask.

    SDPA without a soft cap, the blocks of megacpp/kernels/attention/softcap.py with one.

    Args:
        mask_B1TS: bool, True where a query may look (without a soft cap also additive: 0 there
            and minus infinity elsewhere, in the dtype of q).
        causal: T = S and nothing looks at a later key; a mask, if there is one, says so too.
    """
    if softcap is not None:
        return softcap_attention(q_BTNH, k_BSKH, v_BSKV, scale, softcap, mask_B1TS, causal)
    return _sdpa(q_BTNH, k_BSKH, v_BSKV, scale, mask_B1TS, causal and mask_B1TS is None)


def attention_mask(
    queries: Documents, keys: Documents, dtype: torch.dtype, softcap: float | None
) -> Tensor:
    """Return `document_mask` in the form that `attend` takes fastest, made once a batch.

    Args:
        queries: documents of the queries.
        keys: documents of the keys.
        dtype: of the queries.
        softcap: cap of the scaled scores, which takes a bool mask; None: an additive mask.
    """
    other = None if keys is queries else keys  # a memo must not refer to itself
    mask_B1TS = queries.memo(("attention_mask", other), lambda: document_mask(queries, keys))
    if softcap is not None:
        return mask_B1TS
    return queries.memo(("attention_bias", other, dtype), lambda: _additive(mask_B1TS, dtype))


def document_mask(
    queries: Documents,
    keys: Documents,
    of_queries: slice = slice(None),
    of_keys: slice = slice(None),
) -> Tensor:
    """Return bool `[B, 1, T, S]` (B = 1 for whole rows): same document and not a later token.

    Nor one that the window of the queries leaves behind. Queries and keys may be different tokens
    of one row (context parallelism), as long as their ids and positions are those of the whole row.

    Args:
        queries: documents of the queries.
        keys: documents of the keys.
        of_queries: tile of T.
        of_keys: tile of S.
    """
    rows = slice(1) if _whole(queries) and _whole(keys) else slice(None)
    same_BTS = queries.ids_BT[rows, of_queries, None] == keys.ids_BT[rows, None, of_keys]
    of_T, of_S = queries.positions_BT[rows, of_queries], keys.positions_BT[rows, of_keys]
    seen_BTS = same_BTS & (of_T[:, :, None] >= of_S[:, None, :])
    if queries.window:
        seen_BTS &= of_T[:, :, None] < of_S[:, None, :] + queries.window
    return seen_BTS[:, None]


def _whole(docs: Documents) -> bool:
    """Return whether every row, of which these may be a part, is one document."""
    return docs.whole or (docs.row is not None and docs.row.whole)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a bool mask is True, minus infinity elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, float("-inf"))


def _sdpa(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """Run torch's fused attention: memory linear in T wherever a fused kernel takes the shapes."""
    value_dim = v_BSKV.shape[-1]
    if q_BTNH.device.type in ("cpu", "meta") and value_dim != q_BTNH.shape[-1]:
        from megacpp.kernels.attention.padded import pad_to_one_dim, padded_attention

        if not torch.compiler.is_compiling() and q_BTNH.numel() and k_BSKH.numel():
            return padded_attention(q_BTNH, k_BSKH, v_BSKV, mask, scale, causal)
        q_BTNH, k_BSKH, v_BSKV = pad_to_one_dim(q_BTNH, k_BSKH, v_BSKV)
    if mask is not None and q_BTNH.is_cuda and q_BTNH.shape[2] != k_BSKH.shape[2]:
        # The CUDA kernel that takes a mask (memory-efficient) takes no grouped heads.
        group = q_BTNH.shape[2] // k_BSKH.shape[2]
        k_BSKH, v_BSKV = (t.repeat_interleave(group, dim=2) for t in (k_BSKH, v_BSKV))
    o_BNTV = F.scaled_dot_product_attention(
        q_BTNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKV.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_BTNH.shape[2] != k_BSKH.shape[2],
    )
    o_BTNV = o_BNTV.transpose(1, 2)
    return o_BTNV if o_BTNV.shape[-1] == value_dim else o_BTNV[..., :value_dim]
