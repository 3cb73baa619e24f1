"""Counts of a step, and the sums of its microbatches, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp.data.batches import Batch
from megacpp.model.auxiliary import TERMS
from megacpp.model.head import LossSum


@dataclass(frozen=True)
class Totals:
    """Counts of a step over all ranks: known to the device before its first forward.

    Attributes:
        tokens: the same number of every rank, so no rank need ask.
        target_bytes: 0-d int64.
        valid: int64, labels that count: of each microbatch or, where that is enough, of all.
        microbatches: of this rank.
        ahead: int64, labels further ahead that count, by depth of multi-token prediction.
        by_source: int64, labels that count, by source of a mixture.
    """

    tokens: int
    target_bytes: Tensor
    valid: Tensor
    microbatches: int
    ahead: Tensor
    by_source: Tensor

    def divisors(self, rule: str) -> Tensor:
        """Return the divisor of the loss sum of each microbatch, fp64 `[microbatches]`; never 0.

        `tokens`: the valid tokens of the step, so that the loss is their mean. `microbatches`: each
        microbatch is the mean of its own valid tokens, and the step the mean of microbatches, those
        without a valid token included (`grad_accum_steps x num_chunks` of them). Both are the same
        number where microbatches have equally many.
        """
        if rule == "tokens":
            return self.valid.sum().clamp(min=1).double().expand(self.microbatches)
        assert len(self.valid) == self.microbatches
        return self.valid.clamp(min=1).double() * self.microbatches


@torch.no_grad()
def microbatch_sums(out: LossSum, batch: Batch) -> Tensor:
    """Return loss sum, cross entropy sum, and the latter by source of a mixture: fp64 `[2 + S]`."""
    sums = torch.stack([out.loss_sum.detach(), out.nll_sum.detach()]).double()
    if batch.sources_SB is None:
        return sums
    return torch.cat([sums, batch.sources_SB @ out.nll_B.double()])


@dataclass(frozen=True)
class StepReduction:
    """Numbers of a step that ranks sum together with the gradient norm, on the host.

    Attributes:
        nonfinite: gradient values that weren't finite.
        bad_losses: sums of losses that weren't (ranks of tp may differ in what they see).
        leaving: ranks that were told to stop.
        auxiliary: by term of `TERMS`, coefficient * loss * tokens.
        router_squares: squared norms of the gradients of all routers' logits, by what comes after
            them and by the auxiliary losses.
        loads: choices of experts (`LoadTable`).
    """

    nonfinite: float
    bad_losses: float
    leaving: float
    auxiliary: tuple[float, ...]
    router_squares: tuple[float, float]
    loads: tuple[float, ...]

    @staticmethod
    def pack(
        nonfinite: Tensor,
        bad_losses: Tensor,
        leaving: bool,
        auxiliary: Tensor,
        router_squares: Tensor,
        loads: Tensor,
    ) -> Tensor:
        """Return this rank's numbers, fp64 `[X]`, whose sum `unpack` reads; the host never waits.

        Args:
            nonfinite: `[1]` or 0-d, number of non-finite gradient values.
            bad_losses: `[1]` or 0-d, number of non-finite loss sums.
            leaving: this rank was told to stop.
            auxiliary: `[len(TERMS)]`.
            router_squares: `[2]`.
            loads: fp64 `[N]`.
        """
        stops = loads.new_full((1,), float(leaving))
        parts = [nonfinite.view(1), bad_losses.view(1), stops, auxiliary, router_squares, loads]
        return torch.cat([part.double() for part in parts])

    @staticmethod
    def unpack(numbers: Sequence[float]) -> StepReduction:
        """Return the numbers that all ranks packed, from their sum."""
        nonfinite, bad_losses, leaving, *rest = numbers
        auxiliary, rest = rest[: len(TERMS)], rest[len(TERMS) :]
        after, own, *loads = rest
        return StepReduction(
            nonfinite, bad_losses, leaving, tuple(auxiliary), (after, own), tuple(loads)
        )


@dataclass(frozen=True)
class StepSums:
    """Sums of one step over all ranks and microbatches, as tensors, so the host doesn't wait.

    Attributes:
        loss_sum: what was differentiated: cross entropy and z-loss.
        nll_sum: cross entropy alone, nats.
        totals: see there.
        along: this rank's `StepReduction`, packed; it waits for the gradient norm.
        nll_by_source: cross entropy by source of a mixture, `[S]`.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    totals: Totals
    along: Tensor
    nll_by_source: Tensor

    @property
    def tokens(self) -> int:
        """Tokens of the step, over all ranks."""
        return self.totals.tokens

    @property
    def valid_tokens(self) -> int:
        """Number of labels that count; waits for the device."""
        return int(self.totals.valid.sum())

    @property
    def target_bytes(self) -> int:
        """Bytes that the labels encode; waits for the device."""
        return int(self.totals.target_bytes)
