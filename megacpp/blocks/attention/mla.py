"""Multi-head latent attention of A blocks (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437).

Legend: B rows, T tokens, S cached tokens, D model, N heads, C latent rank (kv_lora_rank), R
rotary dim shared by all heads, L = C + R, H = qk_nope_head_dim + R query/key head dim, V value
head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.blocks.attention.checks import check_heads
from megacpp.blocks.attention.decoding import attend_cached, rotary_table_at
from megacpp.blocks.attention.gqa import CoreAttention
from megacpp.blocks.attention.init import latent_rules
from megacpp.blocks.attention.rope import rotary_table, rotate, softmax_scale
from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents, documents_of
from megacpp.model.norm import RMSNorm
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.token_cache import TokenCache

LATENT_EPS = 1e-6  # of both latent norms, whatever the model's norm_eps (DeepSeek-V3)


class MultiHeadLatentAttention(nn.Module):
    """Attention whose keys and values are expanded from a latent of C + R numbers per token.

    Training expands the latent to full heads and attends; decoding absorbs the expansion into the
    queries and the output and attends to the latents themselves, as if to one shared head.

    Raises:
        ConfigError: an odd rotary dim or a soft cap that isn't positive.
    """

    init_rules = latent_rules
    recompute: Recompute = PLAIN

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = attention = config.attention
        check_heads(attention)
        self.config = config
        self.latent_dim, self.rope_dim = attention.kv_lora_rank, attention.qk_rope_head_dim
        self.nope_dim, self.value_dim = attention.qk_nope_head_dim, attention.v_head_dim
        self.query_dim, num_heads = self.nope_dim + self.rope_dim, attention.num_heads
        if attention.q_lora_rank:
            self.wq_a = nn.Linear(config.dim, attention.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(attention.q_lora_rank, LATENT_EPS)
            self.wq_b = nn.Linear(attention.q_lora_rank, num_heads * self.query_dim, bias=False)
        else:
            self.wq = nn.Linear(config.dim, num_heads * self.query_dim, bias=False)
        self.wkv_a = nn.Linear(config.dim, self.latent_dim + self.rope_dim, bias=False)
        self.kv_norm = RMSNorm(self.latent_dim, LATENT_EPS)
        expanded = num_heads * (self.nope_dim + self.value_dim)
        self.wkv_b = nn.Linear(self.latent_dim, expanded, bias=False)
        self.wo = nn.Linear(num_heads * self.value_dim, config.dim, bias=False)
        self.inner = CoreAttention(softmax_scale(self.query_dim, attention), attention.softcap)

    def forward(self, x_BTD: Tensor, docs: Documents | None = None) -> Tensor:
        """Return the output `[B, T, D]`; positions restart at every document."""
        docs = documents_of(x_BTD, docs)
        table_BTP2 = rotary_table(docs, self.rope_dim, self.config.attention, x_BTD.dtype)
        latent = self.query_latent(x_BTD)
        q_BTNH = self.recompute("mla_q_upproj", self._joined_queries, latent, table_BTP2)
        o_BTNV = self.inner(q_BTNH, *self.latent(x_BTD, table_BTP2), docs, self)
        return self.wo(o_BTNV.flatten(2)).to(x_BTD.dtype)

    def query_latent(self, x_BTD: Tensor) -> Tensor:
        """Return the queries' input: a latent before its norm, or x where there is none."""
        return self.wq_a(x_BTD) if self.config.attention.q_lora_rank else x_BTD

    def queries(self, latent: Tensor, table_BTP2: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries of every head: `[B, T, N, H - R]` unrotated, `[B, T, N, R]` rotated.

        Args:
            latent: `[B, T, q_lora_rank]`, or the input `[B, T, D]` without a query latent.
            table_BTP2: rotary table.
        """
        low_rank = self.config.attention.q_lora_rank > 0
        q = self.wq_b(self.recompute("norm", self.q_norm, latent)) if low_rank else self.wq(latent)
        q_BTNH = q.unflatten(-1, (-1, self.query_dim))
        q_nope, q_pe_BTNR = q_BTNH.split((self.nope_dim, self.rope_dim), dim=-1)
        return q_nope, rotate(q_pe_BTNR, table_BTP2)

    def latent(self, x_BTD: Tensor, table_BTP2: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's normed latent `[B, T, C]` and rotated shared key `[B, T, R]`."""
        c_BTC, k_pe_BTR = self.wkv_a(x_BTD).split((self.latent_dim, self.rope_dim), dim=-1)
        normed_BTC = self.recompute("norm", self.kv_norm, c_BTC)
        return normed_BTC, rotate(k_pe_BTR[:, :, None], table_BTP2)[:, :, 0]

    def expand_kv(
        self, c_BTC: Tensor, k_pe_BTR: Tensor, w_XC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys `[B, T, N, H]` and values `[B, T, N, V]` of every head from the latent alone.

        One matrix product and one concatenation: an activation policy may keep the two arguments
        (C + R numbers per token) and call this again in backward instead of keeping N (H + V).
        `w_XC` takes the place of wkv_b's weight: its rows of some heads, for these alone.
        """
        kv_BTX = self.wkv_b(c_BTC) if w_XC is None else F.linear(c_BTC, w_XC)
        kv = kv_BTX.unflatten(-1, (-1, self.nope_dim + self.value_dim))
        k_nope, v_BTNV = kv.split((self.nope_dim, self.value_dim), dim=-1)
        k_pe_BTNR = k_pe_BTR[:, :, None].expand(-1, -1, kv.shape[2], -1)
        # Values of their own: as a view they would keep the keys of both products alive.
        return torch.cat((k_nope, k_pe_BTNR), dim=-1), v_BTNV.contiguous()

    @property
    def expansion(self) -> Tensor:
        """Weight of the expansion, `[N (H - R + V), C]`."""
        return self.wkv_b.weight

    def keys_values(
        self, c_BTC: Tensor, k_pe_BTR: Tensor, heads: slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `expand_kv` as a recompute region, for all heads or a slice of them."""
        if heads is None:
            return self.recompute("mla_kv", self.expand_kv, c_BTC, k_pe_BTR)

        def of_heads(c_BTC: Tensor, k_pe_BTR: Tensor) -> tuple[Tensor, Tensor]:
            w_NXC = self.expansion.unflatten(0, (-1, self.nope_dim + self.value_dim))
            return self.expand_kv(c_BTC, k_pe_BTR, w_NXC[heads].flatten(0, 1))

        return self.recompute("mla_kv", of_heads, c_BTC, k_pe_BTR)

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> TokenCache:
        """Return an empty cache of latents and shared keys `[c | k_pe]` of `batch_size` rows."""
        shape = (batch_size, 0, self.latent_dim + self.rope_dim)
        return TokenCache.empty(torch.empty(shape, device=device, dtype=dtype))

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, TokenCache]:
        """Return the output `[B, T, D]` of rows of one document each, and the cache behind them."""
        table_BTP2 = rotary_table(docs, self.rope_dim, self.config.attention, x_BTD.dtype)
        q_BTNH = self._joined_queries(self.query_latent(x_BTD), table_BTP2)
        latent = self.latent(x_BTD, table_BTP2)
        y_BTD = self.wo(self.inner(q_BTNH, *latent, docs, self).flatten(2)).to(x_BTD.dtype)
        return y_BTD, TokenCache.filled(torch.cat(latent, dim=-1))

    def step(
        self, x_BD: Tensor, state: TokenCache, chosen: Tensor | None = None
    ) -> tuple[Tensor, TokenCache]:
        """Decode one token after those in the cache; return its output `[B, D]` and the new cache.

        Absorbed: (W_k c) . q = c . (W_k^T q), so a head's query is moved into the latent space
        once instead of moving every cached latent out of it; values likewise on the way back.

        Args:
            x_BD: the token.
            state: latents of the tokens before it.
            chosen: `[B, 1, C]` positions of the keys that it attends to (-1: none); None: all.
        """
        attention = self.config.attention
        table_B1P2 = rotary_table_at(state.positions_B1, self.rope_dim, attention, like=x_BD)
        x_B1D = x_BD[:, None]
        state = state.append(torch.cat(self.latent(x_B1D, table_B1P2), dim=-1))
        q_nope, q_pe_B1NR = self.queries(self.query_latent(x_B1D), table_B1P2)
        kv_NXC = self.wkv_b.weight.unflatten(0, (-1, self.nope_dim + self.value_dim))
        w_k, w_v_NVC = kv_NXC.split((self.nope_dim, self.value_dim), dim=1)
        q_B1NL = torch.cat((torch.einsum("btnh,nhc->btnc", q_nope, w_k), q_pe_B1NR), dim=-1)
        memory_BS1L = state.parts_BS[0][:, :, None]
        # The latent is key and value at once; the value's last R columns are dropped.
        memory = memory_BS1L, memory_BS1L, state.mask_BS
        o_B1NL = attend_cached(self.inner, q_B1NL, *memory, chosen)
        o_B1NV = torch.einsum("btnc,nvc->btnv", o_B1NL[..., : self.latent_dim], w_v_NVC)
        return self.wo(o_B1NV.flatten(2))[:, 0].to(x_BD.dtype), state

    def _joined_queries(self, latent: Tensor, table_BTP2: Tensor) -> Tensor:
        return torch.cat(self.queries(latent, table_BTP2), dim=-1)
