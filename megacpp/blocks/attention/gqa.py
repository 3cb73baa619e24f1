"""Grouped-query attention with rotary positions, for A blocks.

Legend: B rows, T tokens, S cached tokens, D model, N query heads, K key/value heads, H head dim,
V value head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megacpp.blocks.attention.checks import check_heads
from megacpp.blocks.attention.config import layer_settings
from megacpp.blocks.attention.decoding import CachedHeads
from megacpp.blocks.attention.init import grouped_query_rules
from megacpp.blocks.attention.logits import LogitRecorder, observe_logits
from megacpp.blocks.attention.rope import rotary_table, rotate, softmax_scale
from megacpp.config.schema import ModelConfig
from megacpp.kernels.attention.causal import causal_attention
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.linears import linears
from megacpp.model.documents import Documents, documents_of
from megacpp.model.norm import NormOverHeads, RMSNorm
from megacpp.model.recompute import PLAIN, Recompute

if TYPE_CHECKING:
    from megacpp.blocks.attention.mla import MultiHeadLatentAttention


class CoreAttention(nn.Module):
    """Attention softmax(cap(scale q k^T)) v within documents; all tokens of a document meet here.

    A submodule without parameters, which context parallelism swaps.

    Attributes:
        recorder: records the largest logits of training forwards; None: nothing is recorded.
    """

    observe = observe_logits
    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, scale: float, softcap: float | None) -> None:
        super().__init__()
        self.scale, self.softcap = scale, softcap
        self.recorder: LogitRecorder | None = None

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKV: Tensor,
        docs: Documents,
        latents: MultiHeadLatentAttention | None = None,
    ) -> Tensor:
        """Output `[B, T, N, V]`; query head n reads key/value head n // (N / K).

        Args:
            latents: makes keys and values of what is then given in their place: latents
                `[B, T, C]` and shared rotated keys `[B, T, R]`.
        """
        if latents is not None:
            k_BTKH, v_BTKV = latents.keys_values(k_BTKH, v_BTKV)
        return self.attend(q_BTNH, k_BTKH, v_BTKV, docs)

    def attend(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKV: Tensor,
        docs: Documents,
        keys: Documents | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> Tensor:
        """Output `[B, T, N, V]` of queries on given keys, as a recompute region.

        Args:
            keys: documents of the S key tokens (None: those of the queries).
            share: which of how many equal shares of the heads these are.
        """
        if self.recorder is not None:
            self.observe(q_BTNH, k_BSKH, docs, docs if keys is None else keys, share)
        settings = docs, self.scale, self.softcap, self.kernels.attention, keys
        return self.recompute("core_attn", causal_attention, q_BTNH, k_BSKH, v_BSKV, *settings)


class GroupedQueryAttention(CachedHeads):
    """Causal attention, N query heads on K key/value heads (GQA, arXiv 2305.13245).

    Rotary on queries and keys, which RMSNorm over the head dim or all heads may precede
    (`qk_norm`). Keeps 2 K H numbers per token for decoding (`CachedHeads`). The head count is read
    from the activations, so that a rank may hold some of the heads.

    Raises:
        ConfigError: heads that don't divide, an odd head dim, a soft cap that isn't positive.
    """

    init_rules = grouped_query_rules
    recompute: Recompute = PLAIN

    def __init__(self, config: ModelConfig, kind: str = "A") -> None:
        super().__init__()
        self.attention = attention = layer_settings(config.attention, kind)
        check_heads(attention)
        self.config, self.head_dim = config, attention.head_dim
        query_dim = attention.num_heads * attention.head_dim
        kv_dim = attention.num_kv_heads * attention.head_dim
        self.wq = nn.Linear(config.dim, query_dim, bias=attention.qkv_bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=attention.qkv_bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=attention.qkv_bias)
        if attention.output_gate:
            self.wg = nn.Linear(config.dim, query_dim, bias=False)
        self.wo = nn.Linear(query_dim, config.dim, bias=False)
        self.inner = CoreAttention(softmax_scale(attention.head_dim, attention), attention.softcap)
        if attention.qk_norm and attention.qk_norm_wide:
            self.q_norm: RMSNorm = NormOverHeads(query_dim, config.norm_eps)
            self.k_norm: RMSNorm = NormOverHeads(kv_dim, config.norm_eps)
        elif attention.qk_norm:
            self.q_norm = RMSNorm(attention.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(attention.head_dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; positions restart at every document."""
        docs = documents_of(x_BTD, docs)
        table_BTP2 = rotary_table(docs, self.head_dim, self.attention, x_BTD.dtype)
        seen = docs.within(self.attention.window)
        o_BTNH = self.inner(*self._qkv(x_BTD, table_BTP2), seen)
        return self._out(o_BTNH, x_BTD)

    def _out(self, o_BTNH: Tensor, x_BTD: Tensor) -> Tensor:
        """Return the output `[B, T, D]` of all heads' values, gated by the input if it is set."""
        o = o_BTNH.flatten(2)
        o = o * self.wg(x_BTD).sigmoid() if self.config.attention.output_gate else o
        return self.wo(o).to(x_BTD.dtype)

    def _qkv(self, x_BTD: Tensor, table_BTP2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, split into heads."""
        q_BTNH, k_BTKH, v_BTKH = (
            projected.unflatten(-1, (-1, self.head_dim))
            for projected in linears(x_BTD, self.wq, self.wk, self.wv)
        )
        if self.config.attention.qk_norm:
            return *self.recompute("norm", self._normed, q_BTNH, k_BTKH, table_BTP2), v_BTKH
        return rotate(q_BTNH, table_BTP2), rotate(k_BTKH, table_BTP2), v_BTKH

    def _normed(self, q: Tensor, k: Tensor, table_BTP2: Tensor) -> tuple[Tensor, Tensor]:
        """Norm and rotate queries and keys; as one region, only the arguments are saved."""
        if self.config.attention.qk_norm_wide:
            q, k = (
                norm(x.flatten(2)).unflatten(2, x.shape[2:])
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
            return rotate(q, table_BTP2), rotate(k, table_BTP2)
        return rotate(self.q_norm(q), table_BTP2), rotate(self.k_norm(k), table_BTP2)
