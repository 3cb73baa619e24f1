"""Baseline: a dense decoder (GQA + SwiGLU) and its training step in plain PyTorch, one thread.

No configuration, no documents, no fused loss: what a person writes in an afternoon. `bench/step.py`
runs it against megacpp on the same shapes.

Legend: B rows, T tokens, D model, N query heads, K key/value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.config.schema import Config


class PlainBlock(nn.Module):
    """Attention and feed-forward with residuals.

    Args:
        dim: model width.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        hidden: width of the feed-forward.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTD: Tensor, turn_TH: Tensor) -> Tensor:
        """Return the block's output, `[B, T, D]`."""
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = self.qkv(self.attention_norm(x_BTD)).split(sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        q, k = _rotate(q, turn_TH), _rotate(k, turn_TH)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x_BTD = x_BTD + self.out(o.transpose(1, 2).flatten(2))
        h_BTD = self.mlp_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))


class PlainLM(nn.Module):
    """Dense model with the sizes of a megacpp configuration of pattern AF."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model, a = config.model, config.model.attention
        self.embed = nn.Embedding(model.vocab_size, model.dim)
        self.blocks = nn.ModuleList(
            PlainBlock(model.dim, a.num_heads, a.num_kv_heads, a.head_dim, model.mlp.hidden_dim)
            for _ in range(model.depth // 2)
        )
        self.norm = nn.RMSNorm(model.dim)
        self.head = nn.Linear(model.dim, model.vocab_size, bias=False)
        pairs = torch.arange(0, a.head_dim, 2) / a.head_dim
        angles = torch.outer(torch.arange(config.data.seq_len).float(), a.rope_theta**-pairs)
        self.register_buffer("turn_TH", torch.polar(torch.ones_like(angles), angles)[:, None])

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits, `[B, T, V]`."""
        x_BTD = self.embed(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.turn_TH)
        return self.head(self.norm(x_BTD))


class PlainTrainer:
    """Forward, mean cross entropy, backward, clip at 1, fused AdamW."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.model = PlainLM(config).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, ids_BT: Tensor, labels_BT: Tensor) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        logits_BTV = self.model(ids_BT)
        F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()


def _rotate(x_BTNH: Tensor, turn_TH: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_BTNH.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn_TH).flatten(-2).type_as(x_BTNH)
