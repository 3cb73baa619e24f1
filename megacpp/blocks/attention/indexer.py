"""Lightning indexer of a sparse A block: a few small heads that score every key (DSA).

Its input is that of the block, detached, and it learns from its own loss alone: neither does its
loss reach the rest of the model nor the model's loss the indexer. Source:
DeepSeek-V3.2 (arXiv 2512.02556); the mathematics is in megacpp/kernels/sparse_attention/indexer.py.

Legend: B rows, T tokens, S key tokens, D model, L width of the queries' input, J indexer
heads, X indexer head dim, C chosen keys of a query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.attention.decoding import rotary_table_at
from megacpp.blocks.attention.rope import rotary_table
from megacpp.config.schema import ModelConfig
from megacpp.kernels.linears import wide_linear
from megacpp.kernels.sparse_attention.indexer import choose_keys
from megacpp.kernels.sparse_attention.indexer_loss import Target, indexer_loss
from megacpp.model.auxiliary import BUFFERS, AttachLoss, AuxiliarySource
from megacpp.model.documents import Documents
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.init import Constant, Rule
from megacpp.model.linear_init import input_rule
from megacpp.model.recompute import recomputing
from megacpp.model.token_cache import TokenCache
from megacpp.torch_extras import wide

KEY_EPS = 1e-6  # of the norm of keys (DeepSeek-V3.2)


class Index(NamedTuple):
    """Tensors that score keys: `sum_h w[t, h] relu(q[t, h] . k[s])`."""

    q_BTJX: Tensor
    k_BSX: Tensor
    w_BTJ: Tensor  # fp32 or wider

    def detached(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and w without gradient."""
        return self.q_BTJX.detach(), self.k_BSX.detach(), self.w_BTJ.detach()


class Indexer(AuxiliarySource):
    """Queries of J heads, one key a token for all of them, and a weight of each head.

    The first dims of queries and keys turn with position, in halves (i, i + P), although MLA turns
    neighbours: interleaved pairs here were a bug of the first release of DeepSeek-V3.2-Exp.

    Args:
        query_width: of what queries are made of: MLA's query latent after its norm, or x.
    """

    def __init__(self, config: ModelConfig, query_width: int) -> None:
        super().__init__()
        self.config, self.sparse = config, config.attention.sparse
        heads, dim = self.sparse.num_heads, self.sparse.head_dim
        self.rope_dim = index_rope_dim(config.attention)
        self.wq_b = nn.Linear(query_width, heads * dim, bias=False)
        self.wk = nn.Linear(config.dim, dim, bias=False)
        self.k_norm = LayerNorm(dim, KEY_EPS)
        self.weights_proj = IndexHeadWeights(config.dim, heads)
        self.register_losses()

    def forward(self, x_BTD: Tensor, latent_BTL: Tensor, docs: Documents) -> Index:
        """Return the index of the batch's tokens; no gradient flows back to the arguments."""
        table = rotary_table(docs, self.rope_dim, self.config.attention, x_BTD.dtype)
        return self._index(x_BTD.detach(), latent_BTL.detach(), table)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Name of the indexer's loss."""
        return ("indexer",)

    @property
    def learns(self) -> bool:
        """Return whether a backward follows this forward."""
        return self.training and torch.is_grad_enabled()

    def attach(self, o: Tensor, index: Index, target: Target) -> Tensor:
        """Return `o`, whose backward also gives the indexer the gradient of its loss."""
        loss = self.sparse.loss * indexer_loss(*index, target)
        if not recomputing():
            self.record({"indexer": loss})
        return AttachLoss.apply(o, loss, self.aux_scale)  # type: ignore[return-value]

    def step(
        self, x_B1D: Tensor, latent_B1L: Tensor, keys: TokenCache
    ) -> tuple[TokenCache, Tensor]:
        """Return the cache of keys with the next token's, and the token's choice `[B, 1, C]`."""
        attention = self.config.attention
        table = rotary_table_at(keys.positions_B1, self.rope_dim, attention, like=x_B1D)
        q_B1IX, k_B1X, w_B1I = self._index(x_B1D, latent_B1L, table)
        keys = keys.append(k_B1X)
        (keys_BSX,) = keys.parts_BS
        batch, tokens = keys_BSX.shape[:2]
        row = Documents.rows(batch, tokens, keys_BSX.device)
        if not keys.even:  # tokens that a row lacks are no keys of its document
            row = Documents.from_ids((keys.mask_BS == 0).to(torch.int64))
        last = Documents(torch.zeros_like(keys.lengths_B)[:, None], keys.lengths_B[:, None] - 1)
        q_B1IX = q_B1IX.to(keys_BSX.dtype)
        return keys, choose_keys(q_B1IX, keys_BSX, w_B1I, last, row, self.sparse.top_k)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter and buffer, by name below the indexer."""
        rules: dict[str, Rule] = {
            f"{name}.weight": input_rule(self.config) for name in ("wq_b", "wk", "weights_proj")
        }
        rules |= {f"k_norm.{name}": rule for name, rule in self.k_norm.init_rules().items()}
        return rules | {name: Constant(0.0) for name in BUFFERS}

    def _index(self, x_BTD: Tensor, latent_BTL: Tensor, table: Tensor) -> Index:
        q_BTJX = self.wq_b(latent_BTL).unflatten(-1, (-1, self.sparse.head_dim))
        k_BT1X = self.k_norm(self.wk(x_BTD))[:, :, None]
        w_BTJ = self.weights_proj(x_BTD)
        w_BTJ = w_BTJ * (self.sparse.num_heads * self.sparse.head_dim) ** -0.5
        return Index(self._turned(q_BTJX, table), self._turned(k_BT1X, table)[:, :, 0], w_BTJ)

    def _turned(self, x: Tensor, table: Tensor) -> Tensor:
        rest = x.shape[-1] - self.rope_dim
        turning, still = x.split((self.rope_dim, rest), dim=-1)
        turned = rotate_halves(turning, table)
        return torch.cat((turned, still), dim=-1) if rest else turned


class IndexHeadWeights(Fp32Contract):
    """Projection of x to a weight for each indexer head, in fp32 as upstream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the weights `[B, T, J]`, in at least fp32."""
        return wide_linear(x_BTD.flatten(0, 1), self.weight)[0].unflatten(0, x_BTD.shape[:2])


def index_rope_dim(config: AttentionConfig) -> int:
    """Return the dims of an indexer head that rotate: as in MLA, or all for grouped queries.

    Of all, `rope_fraction` turns the same part as of a query.
    """
    return config.qk_rope_head_dim if config.kind == "mla" else config.sparse.head_dim


class LayerNorm(Fp32Contract):
    """Norm (x - mean) / deviation * weight + bias over the last dim, in fp32; dtype of `x`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer norm of `x` `[..., dim]` in its dtype, computed in at least fp32."""
        return F.layer_norm(wide(x), (self.dim,), self.weight, self.bias, self.eps).to(x.dtype)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rules of weight (ones) and bias (zeros)."""
        return {"weight": Constant(1.0), "bias": Constant(0.0)}


def rotate_halves(x_BTNH: Tensor, table_BTP2: Tensor) -> Tensor:
    """Rotate the pairs (i, i + P) by their angles; else as `rotate` of rope.py."""
    a_BTNP, b_BTNP = wide(x_BTNH).chunk(2, dim=-1)
    cos_BT1P, sin_BT1P = table_BTP2[:, :, None].unbind(-1)
    turned = (a_BTNP * cos_BT1P - b_BTNP * sin_BT1P, a_BTNP * sin_BT1P + b_BTNP * cos_BT1P)
    return torch.cat(turned, dim=-1).to(x_BTNH.dtype)
