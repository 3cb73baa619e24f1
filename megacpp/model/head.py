"""Both ends of a language model: rows of a table by id, and the head's summed loss or logits.

Legend: B rows, T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.linear_cross_entropy.chunked import (
    CrossEntropy,
    VocabularyShard,
    linear_cross_entropy,
    soft_cap,
)
from megacpp.model.init import Normal, Rule
from megacpp.torch_extras import autocast_dtype


class Lookup(nn.Module):
    """Rows of a table that this process holds whole."""

    def forward(self, ids: Tensor, weight_VD: Tensor) -> Tensor:
        """Return the rows `[..., D]` of ids `[...]`."""
        return F.embedding(ids, weight_VD)


class Table(nn.Embedding):
    """Embeddings by id. It starts without values: only the model's rules initialise it."""

    def __init__(self, rows: int, dim: int) -> None:
        # A given weight skips nn.Embedding's own init, which on meta costs an import of dynamo
        # (no thread known).
        super().__init__(rows, dim, _weight=torch.empty(rows, dim))
        self.lookup: nn.Module = Lookup()

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows `[..., D]` of ids `input` `[...]`, under autocast in its dtype."""
        rows = self.lookup(input, self.weight)
        return rows.to(autocast_dtype(rows) or rows.dtype)  # a stream as narrow as with FSDP2


@dataclass(frozen=True, eq=False)
class LossSum:
    """Loss as a sum and a count: the accumulation boundary alone divides.

    Attributes:
        loss_sum: 0-d, differentiated: cross entropy plus z-loss, summed over valid tokens.
        valid_tokens: 0-d int64, number of labels that aren't -100.
        nll_sum: 0-d, cross entropy alone in nats, for reports; carries no gradient.
        nll_B: the same by row, `[B]`.
        ahead_sum: 0-d, weighted losses of tokens further ahead (`AheadStates`).
    """

    loss_sum: Tensor
    valid_tokens: Tensor
    nll_sum: Tensor
    nll_B: Tensor
    ahead_sum: Tensor | None = None


class AheadStates(NamedTuple):
    """Further hidden states `[N, T, D]` with labels `[N, T]` (-100: ignored), for the same head.

    Each label's loss counts `weight_N`; with `detached` the head learns nothing from them.
    """

    x_NTD: Tensor
    labels_NT: Tensor
    weight_N: Tensor
    detached: bool = False


# FSDP2 looks for tensors in a module's output to start its backward; it must see into this one, as
# torch 2.13 does by itself (no thread known).
pytree.register_dataclass(LossSum)


class LanguageModelHead(nn.Module):
    """Linear head with fused cross entropy: training never materialises logits `[B, T, V]`.

    Args:
        config: sizes, soft cap and z-loss.
        tied: the embedding weight `[V, D]`, when it is the head's weight too.

    Attributes:
        shard: words that the weight holds, when the vocabulary is sharded over processes.
    """

    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, config: ModelConfig, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        self.softcap, self.z_loss = config.logit_softcap, config.z_loss
        self.init_std = config.init_std
        if tied is None:
            tied = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.weight = tied
        self.shard: VocabularyShard | None = None

    def forward(
        self, x_BTD: Tensor, labels_BT: Tensor, ahead: AheadStates | None = None
    ) -> LossSum:
        """Return the loss of `labels_BT` (shifted; -100: ignored), summed over valid tokens.

        `ahead` has the same soft cap and z-loss. It comes with the same call: FSDP2 would reduce
        the weight's gradient once for each.
        """
        out = self._loss(x_BTD, labels_BT, self.weight)
        nll_B = out.nll_N.view(labels_BT.shape).sum(1)
        if ahead is None:
            return LossSum(out.loss_sum, out.valid_tokens, out.nll_sum, nll_B)
        weight = self.weight.detach() if ahead.detached else self.weight
        further = self._loss(ahead.x_NTD, ahead.labels_NT, weight, ahead.weight_N)
        return LossSum(out.loss_sum, out.valid_tokens, out.nll_sum, nll_B, further.loss_sum)

    def _loss(
        self, x_BTD: Tensor, labels_BT: Tensor, weight: Tensor, counts_N: Tensor | None = None
    ) -> CrossEntropy:
        return linear_cross_entropy(
            x_BTD.flatten(0, -2),
            weight,
            labels_BT.flatten(),
            self.softcap,
            self.z_loss,
            shard=self.shard,
            weight_N=counts_N,
            backend=self.kernels.cross_entropy,
        )

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Return logits `[..., V]` of hidden states `[..., D]`, in their dtype, soft-capped."""
        return soft_cap(F.linear(x_BTD, self.weight), self.softcap)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of the weight; a tied one is the embedding's."""
        return {"weight": Normal(self.init_std)}
