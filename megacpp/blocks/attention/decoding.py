"""Attention of one new token to those in a cache.

Legend: B rows, T tokens, S cached tokens, D model, N query heads, K key/value heads, H head dim,
V value head dim, C chosen keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.attention.rope import angle_table, rotary_table
from megacpp.kernels.attention.causal import attend
from megacpp.kernels.sparse_attention.reference import chosen_mask
from megacpp.model.documents import Documents
from megacpp.model.token_cache import TokenCache


def attend_cached(
    core: Any,
    q_B1NH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    mask_BS: Tensor | None,
    chosen_B1C: Tensor | None = None,
) -> Tensor:
    """Return the output `[B, 1, N, V]` of one query over every cached token or the chosen ones.

    Args:
        core: `CoreAttention` of the layer.
        q_B1NH: the query.
        k_BSKH: cached keys.
        v_BSKV: cached values.
        mask_BS: bool, the tokens that a row has; None: all.
        chosen_B1C: positions of chosen keys (-1: none), of tokens that the row has; None: all.
    """
    mask_B1TS = None if mask_BS is None else mask_BS[:, None, None]
    if chosen_B1C is not None:
        mask_B1TS = chosen_mask(chosen_B1C, k_BSKH.shape[1])[:, None]
    narrow = q_B1NH.to(k_BSKH.dtype)
    o_B1NV = attend(narrow, k_BSKH, v_BSKV, core.scale, core.softcap, mask_B1TS)
    return o_B1NV.to(q_B1NH.dtype)


def rotary_table_at(
    positions_B1: Tensor, dim: int, config: AttentionConfig, like: Tensor
) -> Tensor:
    """Return (cos, sin) at positions, `[B, 1, P, 2]`, for decoding.

    Args:
        positions_B1: in the document, `[1, 1]` for all rows or `[B, 1]`.
        dim: rotated dims of a head, 2 P.
        config: base and YaRN settings.
        like: any shape; its device, and its dtype or fp32.
    """
    return angle_table(positions_B1, dim, config, torch.promote_types(like.dtype, torch.float32))


class CachedHeads(nn.Module):
    """Decoding of grouped-query attention from a cache of rotated keys and of values.

    Its subclass makes queries, keys and values (`_qkv`) and the output (`_out`).
    """

    attention: AttentionConfig
    head_dim: int
    inner: Any
    _qkv: Any
    _out: Any

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> TokenCache:
        """Return an empty cache of rotated keys and values of `batch_size` rows."""
        shape = (batch_size, 0, self.attention.num_kv_heads, self.head_dim)
        empty = torch.empty(shape, device=device, dtype=dtype)
        return TokenCache.empty(empty, empty, window=self.attention.window)

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, TokenCache]:
        """Return the output `[B, T, D]` of rows of one document each, and the cache behind them."""
        table_BTP2 = rotary_table(docs, self.head_dim, self.attention, x_BTD.dtype)
        q_BTNH, k_BTKH, v_BTKH = self._qkv(x_BTD, table_BTP2)
        window = self.attention.window
        o_BTNH = self.inner(q_BTNH, k_BTKH, v_BTKH, docs.within(window))
        return self._out(o_BTNH, x_BTD), TokenCache.filled(k_BTKH, v_BTKH, window=window)

    def step(
        self, x_BD: Tensor, state: TokenCache, chosen: Tensor | None = None
    ) -> tuple[Tensor, TokenCache]:
        """Decode one token after those in the cache; return its output `[B, D]` and the new cache.

        Args:
            x_BD: the token.
            state: keys and values of the tokens before it.
            chosen: `[B, 1, C]` positions of the keys that it attends to (-1: none); None: all.
        """
        table_B1P2 = rotary_table_at(state.positions_B1, self.head_dim, self.attention, like=x_BD)
        q_B1NH, k_B1KH, v_B1KH = self._qkv(x_BD[:, None], table_B1P2)
        state = state.append(k_B1KH, v_B1KH)
        keys, values = state.parts_BS
        o_B1NH = attend_cached(self.inner, q_B1NH, keys, values, state.mask_BS, chosen)
        return self._out(o_B1NH, x_BD[:, None])[:, 0], state
