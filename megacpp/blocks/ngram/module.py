"""Hashed n-grams: the last two, three, ... tokens, looked up and added to the embedding.

Each order of n-gram has `heads` tables, and all of them stand in one, one below the other. A row is
found by hashing token ids (megacpp/blocks/ngram/hashing.py), so nothing that is learned decides
what is read, and the rows of a whole batch are known before the first block runs.

Legend: B rows of the batch, T tokens, D model, K tables, U numbers of a table's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from megacpp.blocks.ngram.hashing import PAD, hashed_orders, odd_multipliers
from megacpp.blocks.ngram.sizes import ngram_primes, ngram_rows
from megacpp.config.schema import ModelConfig
from megacpp.model.beside import tokens_beside
from megacpp.model.documents import Documents
from megacpp.model.head import Table
from megacpp.model.init import Constant, Normal, Rule
from megacpp.torch_extras import listed

SEED = 2_718_281  # of the multipliers: learned tables depend on it


class NgramEmbedding(nn.Module):
    """Rows of all tables side by side, projected to the model; zero at the start.

    An n-gram that would begin before its document holds PAD in the places outside.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.init_std, self.order = config.init_std, config.ngram.max_order
        flat = ngram_primes(config.ngram)
        heads, width = config.ngram.heads, config.ngram.dim
        self.primes = [flat[i : i + heads] for i in range(0, len(flat), heads)]  # by order
        self.first = [0, *accumulate(flat)][:-1]  # rows of the tables above
        self.multipliers = odd_multipliers(SEED, 0, config.vocab_size, self.order)
        self.tables = Table(ngram_rows(config.ngram), width)
        self.proj = nn.Linear(len(flat) * width, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """Return `x_BTD` plus its n-gram embeddings; `docs` has the ids of whole rows."""
        return x_BTD + self.proj(self.tables(self.rows_of(docs)).flatten(2))

    def rows_of(self, docs: Documents) -> Tensor:
        """Return rows int64 `[B, T, K]` of the stacked table for each token and table, by n."""
        return self._rows([tokens_beside(docs, -back, PAD) for back in range(self.order)])

    def init_state(self, batch: int, device: torch.device) -> Tensor:
        """Return the last ids before an empty sequence, `[B, order - 1]`, the nearest first."""
        return torch.full((batch, self.order - 1), PAD, device=device)

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, Tensor]:
        """Return `x_BTD` plus the n-gram embeddings of a prompt, and the state behind it."""
        recent = [tokens_beside(docs, -back, PAD)[:, -1] for back in range(self.order - 1)]
        return self(x_BTD, docs), torch.stack(recent, 1)

    def step(self, x_BD: Tensor, ids_B: Tensor, state_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Decode one token: return `x_BD` plus its n-gram embedding, and the next state."""
        recent_BN = torch.cat([ids_B[:, None], state_BN], 1)
        rows_BK = self._rows(recent_BN.split(1, 1))
        return x_BD + self.proj(self.tables(rows_BK[:, 0]).flatten(1)), recent_BN[:, :-1]

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter, by name below the module."""
        return {"tables.weight": Normal(self.init_std), "proj.weight": Constant(0.0)}

    def _rows(self, ids_by_shift: Sequence[Tensor]) -> Tensor:
        rows_BTK = hashed_orders(ids_by_shift, self.multipliers, self.primes)
        return rows_BTK + listed(self.first, rows_BTK.device)
