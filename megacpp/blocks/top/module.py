"""Token order prediction: a second unembedding that learns which words come sooner.

It reads the hidden states that the head reads and hangs its loss onto them, so it trains the trunk
and is no part of the model that is used (TOP, arXiv 2508.19228).

Legend: B rows, T tokens, D model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacpp.config.schema import ModelConfig
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.linear_cross_entropy.chunked import VocabularyShard
from megacpp.kernels.token_order import TokensAhead, token_order_loss
from megacpp.model.auxiliary import BUFFERS, AttachLoss, AuxiliarySource
from megacpp.model.documents import Documents
from megacpp.model.init import Constant, Normal, Rule


class TokenOrder(AuxiliarySource):
    """Unembedding and loss of token order prediction, a mean over all tokens.

    Tokens with nothing ahead count as well. The end of a row counts as the end of its document.
    Logits aren't soft-capped, whatever the head does (nor are they in the paper): no word is
    sampled from them, and the target is soft enough to keep them small.

    Attributes:
        shard: words that the weight holds, when the vocabulary is sharded over processes.
    """

    kernels: Kernels = PLAIN_KERNELS
    of_vocabulary = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top, self.init_std = config.top, config.init_std
        # A module of its own: what an AuxiliarySource itself owns stays fp32.
        self.unembed = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.shard: VocabularyShard | None = None
        self.register_losses()

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Name of its loss."""
        return ("top",)

    def attached(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """Return `x_BTD` for the head, in training with the loss attached."""
        if not (self.training and torch.is_grad_enabled()):
            return x_BTD
        return AttachLoss.apply(x_BTD, self(x_BTD, docs), self.aux_scale)  # type: ignore[return-value]

    def forward(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """Return coefficient * loss * tokens, and record it."""
        loss = self.top.loss * self.loss_sum(x_BTD, docs)
        self.record({"top": loss})
        return loss

    def loss_sum(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """Sum the loss over tokens; `docs` has the ids of whole rows."""
        row = docs if docs.row is None else docs.row
        assert row.tokens_BT is not None, "documents that know no tokens (Documents.with_tokens)"
        ahead = TokensAhead.from_rows(row.tokens_BT, row.ends_BT, self.top.window, docs.index_T)
        x_ND, weight_VD = x_BTD.flatten(0, -2), self.unembed.weight
        backend = self.kernels.cross_entropy
        return token_order_loss(x_ND, weight_VD, ahead, shard=self.shard, backend=backend)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter and buffer, by name below the module."""
        zeros: dict[str, Rule] = {name: Constant(0.0) for name in BUFFERS}
        return {"unembed.weight": Normal(self.init_std), **zeros}
