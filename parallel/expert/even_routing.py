"""Even choices of experts, whose counts every rank knows: for runs without values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.blocks.experts.choices import circle, columns
from megacpp.blocks.experts.config import MoEConfig
from megacpp.torch_extras import listed

Exchanged = tuple[list[list[int]], list[list[int]]]  # to each rank, from each rank


@dataclass(frozen=True)
class EvenRouting:
    """Choices known in advance: all experts get an even share, on every rank alike.

    Of the columns of the choices the first top_k are real experts, which is their mean.

    A token visits K neighbours on a shuffled circle of all experts, so that it meets about as many
    ranks as it would by chance. For runs without values (fake process groups, fake tensors) and for
    measurements that are to be free of luck; every rank must have as many tokens.
    """

    num_experts: int
    top_k: int
    columns: int = 0  # of the choices (0: top_k); the rest are nulls
    num_groups: int = 1
    top_k_groups: int = 1

    @staticmethod
    def from_config(moe: MoEConfig) -> EvenRouting:
        """Return the even routing of a configuration's experts, groups and columns."""
        groups = moe.num_groups, moe.top_k_groups
        return EvenRouting(moe.num_experts, moe.top_k, columns(moe), *groups)

    @property
    def circle(self) -> Sequence[int]:
        """Every expert once."""
        return circle(self.num_experts, self.num_groups, self.top_k_groups)

    def indices(self, tokens: int, device: torch.device) -> Tensor:
        """Return the chosen experts `[T, K]` of `tokens` tokens; nulls are `num_experts`."""
        place_N = torch.arange(tokens * self.top_k, device=device) % self.num_experts
        circle_E = listed(self.circle, device)
        chosen_TK = circle_E[place_N].view(tokens, self.top_k)
        nulls = max(0, self.columns - self.top_k)
        return F.pad(chosen_TK, (0, nulls), value=self.num_experts) if nulls else chosen_TK

    def copies(self, tokens: int, ranks: int, rank: int) -> Exchanged:
        """Return copies sent to each expert of each rank, and copies that each rank sends here.

        Args:
            tokens: of every rank.
            ranks: of the group.
            rank: this one.
        """
        rounds, rest = divmod(tokens * self.top_k, self.num_experts)
        counts = [rounds] * self.num_experts
        for expert in self.circle[:rest]:
            counts[expert] += 1
        to_We = _split(counts, ranks)
        return to_We, [to_We[rank]] * ranks

    def rows(self, tokens: int, ranks: int, rank: int) -> Exchanged:
        """Return rows and copies that a rank sends to each rank, and that each rank sends here.

        Args:
            tokens: of every rank.
            ranks: of the group.
            rank: this one.
        """
        E, K, each = self.num_experts, self.top_k, self.num_experts // ranks
        period = E // math.gcd(E, K)
        counts = [0] * ranks
        for t in range(min(period, tokens)):
            times = (tokens - t - 1) // period + 1
            for owner in {self.circle[(t * K + k) % E] // each for k in range(K)}:
                counts[owner] += times
        copies_We, _ = self.copies(tokens, ranks, rank)
        to_Wn = [[n, *c] for n, c in zip(counts, copies_We, strict=True)]
        return to_Wn, [to_Wn[rank]] * ranks


def _split(counts: Sequence[int], ranks: int) -> list[list[int]]:
    each = len(counts) // ranks
    return [list(counts[r * each : (r + 1) * each]) for r in range(ranks)]
