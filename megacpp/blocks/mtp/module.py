"""Multi-token prediction: from a token's hidden state and the tokens after it, the next one.

    depth k = 1 .. K, token i     fed: the embedding of token i + k        label: token i + k + 1

Ids and labels are moved by k each, separately: labels are one token ahead already. Moving both from
the labels, as some ports do, would feed the embedding of the very token that is asked for.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), FastMTP (2509.18362, one block for all),
Megatron-LM's multi_token_prediction.py (order of the projection's halves, mean over valid tokens).

Legend: B rows, T tokens, D model, K depths, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacpp.blocks.mtp.plan import block_model, coefficient, depth_weights, num_blocks
from megacpp.config.schema import ModelConfig
from megacpp.model.auxiliary import BUFFERS, AttachLoss, AuxiliarySource
from megacpp.model.beside import labels_beside, tokens_beside
from megacpp.model.block import Block
from megacpp.model.documents import Documents
from megacpp.model.head import AheadStates, LossSum
from megacpp.model.init import Constant, Rule
from megacpp.model.linear_init import input_rule
from megacpp.model.norm import RMSNorm
from megacpp.model.recompute import PLAIN, Recompute

IGNORED = -100


class PredictionBlock(nn.Module):
    """Depth of prediction: norms, projection of both halves to one, attention, feed-forward, norm.

    The blocks are plain: no experts, no Mamba, no sparse attention, no memories (2509.18362).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        plain = block_model(config)
        self.config = plain
        self.embed_norm = RMSNorm(config.dim, config.norm_eps)
        self.hidden_norm = RMSNorm(config.dim, config.norm_eps)
        self.projection = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.attention = Block("A", plain)
        self.feed_forward = Block("F", plain)
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, hidden_BTD: Tensor, embedded_BTD: Tensor, docs: Documents
    ) -> tuple[Tensor, Tensor]:
        """Hidden states of this depth, before their norm and after it: `[B, T, D]` each."""
        # Autocast leaves the residual stream as wide as embeddings are; so it does here.
        x_BTD = self.projection(self._halves(hidden_BTD, embedded_BTD)).to(embedded_BTD.dtype)
        x_BTD = self.feed_forward(self.attention(x_BTD, docs), docs)
        return x_BTD, self.norm(x_BTD)

    def _halves(self, hidden_BTD: Tensor, embedded_BTD: Tensor) -> Tensor:
        """Return the input of the projection, `[B, T, 2 D]`."""
        halves = self.embed_norm(embedded_BTD), self.hidden_norm(hidden_BTD)
        first = self.config.mtp.order == "embedding_hidden"
        return torch.cat(halves if first else halves[::-1], -1)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter, by name below the block."""
        rules: dict[str, Rule] = {"projection.weight": input_rule(self.config)}
        for name in ("embed_norm", "hidden_norm", "attention", "feed_forward", "norm"):
            own = getattr(self, name).init_rules().items()
            rules |= {f"{name}.{leaf}": rule for leaf, rule in own}
        return rules


class MultiTokenPrediction(AuxiliarySource):
    """Prediction of all depths; the embedding and the head are the model's own.

    The loss of depth k is the mean over its valid labels in the whole step, on whatever ranks and
    in whatever microbatches: `weights_K` undoes the 1 / tokens of `aux_scale`.

    Attributes:
        weights_K: what the summed loss of each depth is multiplied by, set before the forward of a
            step (`weigh`): coefficient * weight of the depth * tokens / valid labels of it.
    """

    weights_K: Tensor
    recompute: Recompute = PLAIN  # of each depth but the last; blocks inside have theirs
    of_vocabulary = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mtp = config.mtp
        self.blocks = nn.ModuleList(PredictionBlock(config) for _ in range(num_blocks(config.mtp)))
        self.register_losses()
        self.register_buffer("weights_K", torch.empty(config.mtp.depths), persistent=False)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Name of its loss."""
        return ("mtp",)

    def forward(
        self, embed: nn.Module, x_BTD: Tensor, normed_BTD: Tensor, docs: Documents
    ) -> Tensor:
        """Return the hidden states of all depths for the head, stacked: `[K B, T, D]`.

        Args:
            embed: looks tokens up, those of all depths in one call: FSDP2 gathers its weight, and a
                sharded vocabulary sums over ranks, once per call.
            x_BTD, normed_BTD: the trunk's last hidden states, before and after its last norm.
            docs: documents, with the ids of whole rows.
        """
        embedded_NTD = embed(self.ids(docs))
        post = self.mtp.hidden == "post_norm"
        hidden_BTD, found = normed_BTD if post else x_BTD, []
        if self.mtp.detach_trunk:
            hidden_BTD, embedded_NTD = hidden_BTD.detach(), embedded_NTD.detach()
        for k, embedded_BTD in enumerate(embedded_NTD.chunk(self.mtp.depths)):
            block = self.blocks[min(k, len(self.blocks) - 1)]
            # The backward of the last depth comes at once, so dropping its tensors saves nothing.
            recompute = self.recompute if k < self.mtp.depths - 1 else PLAIN
            states = recompute("block", block, hidden_BTD, embedded_BTD, docs)
            hidden_BTD = states[post]
            found.append(states[1])
            del states  # what isn't handed on goes
        return torch.cat(found)

    def ids(self, docs: Documents) -> Tensor:
        """Return the ids 1 to K tokens ahead, `[K B, T]`; 0 where the document has none."""
        return torch.cat([tokens_beside(docs, k, 0) for k in self._depths()])

    def ahead(self, hidden_NTD: Tensor, docs: Documents) -> AheadStates:
        """Return hidden states, labels and weights of all depths for the head."""
        labels_NT = torch.cat([labels_beside(docs, k, IGNORED) for k in self._depths()])
        weights_N = self.weights_K.repeat_interleave(labels_NT.numel() // self.mtp.depths)
        return AheadStates(hidden_NTD, labels_NT, weights_N, self.mtp.detach_head)

    def attach(self, out: LossSum) -> LossSum:
        """Return the head's result with the loss of all depths attached to the next token's."""
        assert out.ahead_sum is not None
        self.record({"mtp": out.ahead_sum.detach()})
        loss_sum = AttachLoss.apply(out.loss_sum, out.ahead_sum, self.aux_scale)
        loss_sum = loss_sum.clone()  # type: ignore[union-attr]  # views: pytorch#181850
        return LossSum(loss_sum, out.valid_tokens, out.nll_sum, out.nll_B)

    @torch.no_grad()
    def weigh(self, tokens: int, valid_K: Tensor, step: int, steps: int) -> None:
        """Set `weights_K` for an optimizer step.

        Args:
            tokens: of the step, over all ranks.
            valid_K: labels of each depth that count.
            step: number of the step.
            steps: steps of the run.
        """
        share = coefficient(self.mtp, step, steps)
        for k, weight in enumerate(depth_weights(self.mtp)):
            self.weights_K[k] = share * weight * tokens
        self.weights_K /= valid_K.clamp(min=1)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter and buffer, by name below the module."""
        rules: dict[str, Rule] = {name: Constant(0.0) for name in (*BUFFERS, "weights_K")}
        for number, block in enumerate(self.blocks):
            assert isinstance(block, PredictionBlock)
            own = block.init_rules().items()
            rules |= {f"blocks.{number}.{name}": rule for name, rule in own}
        return rules

    def _depths(self) -> range:
        return range(1, self.mtp.depths + 1)


def with_depths(
    mtp: MultiTokenPrediction,
    embed: nn.Module,
    head: nn.Module,
    x_BTD: Tensor,
    normed_BTD: Tensor,
    labels_BT: Tensor,
    docs: Documents,
) -> LossSum:
    """Return the head's loss of the next token, with those of the tokens after it attached.

    The head is called once for all depths: FSDP2 reduces its gradient once.

    Args:
        mtp: module of the depths.
        embed: embedding.
        head: language-model head.
        x_BTD: the trunk's last hidden states.
        normed_BTD: the same behind its last norm.
        labels_BT: of the next token; -100: ignored.
        docs: documents, with ids and labels of whole rows.
    """
    hidden_NTD = mtp(embed, x_BTD, normed_BTD, docs)
    return mtp.attach(head(normed_BTD, labels_BT, mtp.ahead(hidden_NTD, docs)))
