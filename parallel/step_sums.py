"""What a step is made of, and what its microbatches sum to, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """What a step is made of, over all ranks: known to the device before its first forward.

    Attributes:
        tokens: the same number of every rank, so nobody need ask.
        target_bytes: int64, a number.
        valid: int64, labels that count: of each microbatch or, where that is enough, of all.
        ahead: int64, labels further ahead that count, by depth of multi-token prediction.
    """

    tokens: int
    target_bytes: Tensor
    valid: Tensor
    microbatches: int
    ahead: Tensor

    def divisors(self, rule: str) -> Tensor:
        """What the loss sum of each microbatch is divided by; never 0. fp64 `(microbatches,)`.

        `tokens`: the valid tokens of the step, so that the loss is their mean. `microbatches`: each
        microbatch is the mean of its own valid tokens, and the step the mean of microbatches, those
        without a valid token included (`grad_accum_steps x num_chunks` of them). Both are the same
        number where microbatches have equally many.
        """
        if rule == "tokens":
            return self.valid.sum().clamp(min=1).double().expand(self.microbatches)
        assert len(self.valid) == self.microbatches
        return self.valid.clamp(min=1).double() * self.microbatches


@dataclass(frozen=True)
class StepSums:
    """Sums of one step over all ranks and microbatches; still tensors, so nothing waits.

    Attributes:
        loss_sum: what was differentiated: cross entropy and z-loss.
        nll_sum: cross entropy alone, nats.
        totals: see there.
        along: fp64 numbers of this rank that wait to be summed over all ranks together with the
            gradient norm: values that weren't finite, losses that weren't, whether it was
            told to stop, auxiliary losses, gradients of routers, loads of experts.
    """

    loss_sum: Tensor
    nll_sum: Tensor
    totals: Totals
    along: Tensor

    @property
    def tokens(self) -> int:
        return self.totals.tokens

    @property
    def valid_tokens(self) -> int:
        """Waits for the device; so does `target_bytes`."""
        return int(self.totals.valid.sum())

    @property
    def target_bytes(self) -> int:
        return int(self.totals.target_bytes)
