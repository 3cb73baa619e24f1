"""Router with null experts, so that tokens have more or fewer real ones (arXiv 2601.15370).

Legend: T tokens, E experts, K experts of a token at most (megacpp/blocks/experts/choices.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacpp.blocks.experts.choices import first_null_score, null_copies, slots
from megacpp.blocks.experts.router import Router, Routing
from megacpp.config.schema import ModelConfig
from megacpp.model.init import Constant, Rule

FINE = 2.0**24  # in what scores are counted


class NullRouter(Router):
    """Routing with null experts (`null_rho` < 1), which compute nothing and weigh nothing.

    The K best experts are chosen as far as their score (and bias) is above that of a null. Weights
    are of the others alone, so that no loss has a gradient for the score of a null, which therefore
    is no function of the token: a learned row of `weight` would stay what it was at first. It is
    measured instead: where scores rise or fall together, nothing but their order matters to a loss,
    and steps of a bias could not keep up.

    Attributes:
        null_score: `()`, the score of a null: that between the `top_k` best experts of a token and
            the others (bias included), on average over the last step.
        null_bias: `()`, added to it (to its logarithm, of a softmax); moved by `update_bias`, so
            that tokens have `top_k` real experts on average.
        tokens_per_expert: int64 `(E + 2,)`: as without nulls, then choices that were null, of K
            each, and the sum of what `null_score` is the mean of, times `FINE`.
    """

    null_score: Tensor
    null_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.nulls = null_copies(config.moe)
        self.register_buffer("null_score", torch.empty(()))
        self.register_buffer("null_bias", torch.empty(()))
        counts_X = torch.empty(config.moe.num_experts + 2, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts_X, persistent=False)

    def observe(self, routing: Routing) -> None:
        """Count what a training forward chose, and measure its scores."""
        super().observe(routing)
        self.measure(routing.scores_TE)

    @torch.no_grad()
    def measure(self, scores_TE: Tensor) -> None:
        """Add the score at which a null belongs, in whole numbers, whose sum has no order."""
        best_TK = self.selection(scores_TE).topk(self.top_k, dim=1).values
        last, next_one = self.moe.top_k - 1, min(self.moe.top_k, self.top_k - 1)
        between_T = (best_TK[:, last] + best_TK[:, next_one]).double() / 2
        self.tokens_per_expert[-1] += (between_T * FINE).round().to(torch.int64).sum()

    @property
    def null_level(self) -> Tensor:
        """Score of a null with its bias."""
        if self.moe.score == "sigmoid":
            return self.null_score + self.null_bias
        return self.null_score * self.null_bias.exp()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Update score and bias of nulls as well, once per step.

        Their bias goes up while tokens have more than `top_k` real experts on average, down while
        fewer.
        """
        if self.weight.requires_grad:
            nulls, scores = self.tokens_per_expert[-2:]
            real = self.tokens_per_expert[: self.moe.num_experts].sum()
            chosen = real + nulls
            too_many = real * self.top_k - chosen * self.moe.top_k
            self.null_bias.add_(torch.sign(too_many), alpha=self.moe.bias_update_rate)
            mean = scores.double() / (chosen / self.top_k).clamp(min=1.0) / FINE
            self.null_score.copy_(torch.where(chosen > 0, mean, self.null_score))
        super().update_bias()

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of every parameter and buffer, by name below the router."""
        score = Constant(first_null_score(self.config))
        return super().init_rules() | {"null_score": score, "null_bias": Constant(0.0)}

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the K best experts of the best groups, bias included; E where a null is better.

        This is top-k over scores of experts and of all copies of the null, which win where equal.
        """
        best_TK, indices_TK = self.selection(scores_TE).topk(self.top_k, dim=1)
        null_TK = best_TK <= self.null_level
        null_TK[:, : max(0, slots(self.moe) - self.nulls)] = False  # more slots than copies
        return indices_TK.masked_fill(null_TK, self.moe.num_experts)
