"""Sums of a step over microbatches and ranks, and guards against values that spoil them.

Totals, StepReduction, StepSums    counts and sums
NonFiniteGuard                     looks at gradients before ranks add them up
LossScale                          fp16's factor of the loss, halved by a step that overflows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp.config.schema import PrecisionConfig
from megacpp.data.batches import Batch
from megacpp.model.auxiliary import TERMS
from megacpp.model.head import LossSum
from megacpp.model.hybrid import HybridLM
from megacpp.torch_extras import local_parts
from parallel.mesh import World
from parallel.watched_units import watched_units

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from parallel.stages import Stage

LEAST, MOST = 2.0**-16, 2.0**32  # beyond these no step's gradients tell anything


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


class NonFiniteGuard:
    """Guard that counts gradient values which aren't finite, and zeroes them, before any sum.

    A sum over ranks spreads one NaN to all of them and hides where it came from. So each rank looks
    at what it is about to give: the flat buffer of every reduce-scatter of FSDP2, and, where a unit
    has no such reduction (one shard, one process), the gradients themselves. Counts stay on the
    device; they travel with the gradient norm, so that nothing waits that wouldn't wait anyway.

    Attributes:
        names: of what is watched: units of FSDP2, then parameters that no reduction sees.
        counts: int64, values of each that weren't finite since `reset`, on this rank.
    """

    def __init__(
        self, model: HybridLM, world: World, stages: Sequence[Stage] = (), looks: bool = True
    ) -> None:
        """Watch the gradients of a model.

        Args:
            model: this rank's part of the model.
            world: ranks that add up gradients.
            stages: of this rank, where a pipeline has some; these are then the roots of FSDP2.
            looks: False watches nothing: no pass over gradients, and no count.
        """
        units, unseen = watched_units(model, world, stages) if looks else ([], lambda name: False)
        self.loose = [(name, p) for name, p in model.named_parameters() if unseen(name)]
        self.names = [name for name, _ in (*units, *self.loose)]
        self.counts = torch.zeros(len(self.names), dtype=torch.int64, device=world.device)
        for number, (_, unit) in enumerate(units):
            look_before_reduction(unit, lambda values, n=number: self.clean(n, values))

    @property
    def total(self) -> Tensor:
        """Number of non-finite values on this rank since `reset`, 0-d fp64."""
        return self.counts.sum(dtype=torch.float64)

    @torch.no_grad()
    def clean(self, number: int, values: Tensor) -> None:
        """Count the non-finite entries of `values` and put zeros there.

        Args:
            number: row of `counts`.
            values: any shape; changed in place.
        """
        if _known_finite([values]):
            return
        self.counts[number] += values.numel() - values.isfinite().sum()
        torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)

    @torch.no_grad()
    def clean_unreduced(self) -> None:
        """Clean gradients that no reduce-scatter has seen; call it after the last backward.

        No other rank has received any part of these yet.
        """
        first = len(self.names) - len(self.loose)
        grads = {n: p.grad for n, (_, p) in enumerate(self.loose, first) if p.grad is not None}
        local = local_parts(grads.values())
        if not _known_finite(local):
            for number, values in zip(grads, local, strict=True):
                self.clean(number, values)

    def reset(self) -> None:
        """Zero all counts."""
        self.counts.zero_()

    def found(self) -> dict[str, int]:
        """Return counts by name, without the zeros; waits for the device."""
        return {n: c for n, c in zip(self.names, self.counts.tolist(), strict=True) if c}


def _known_finite(tensors: list[Tensor]) -> bool:
    """Return whether a CPU finds all entries of some tensors, of any shapes, to be finite.

    The 2-norm is the cheapest look by far; where it overflows, a count decides. A GPU would have to
    wait for the answer.
    """
    if not tensors or tensors[0].device.type != "cpu":
        return not tensors
    norms = torch._foreach_norm(tensors)
    return math.isfinite((torch.stack(norms).sum() if norms[1:] else norms[0]).item())


def look_before_reduction(unit: FSDPModule, look: Callable[[Tensor], None]) -> None:
    """Have a unit's reduce-scatters show their flat input first, which `look` may change.

    It is in the dtype of the reduction and belongs to FSDP2, which drops it afterwards.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Watched(DefaultReduceScatter):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> Any:
            look(input_tensor)
            return super().__call__(output_tensor, input_tensor, group, op, async_op)

    unit.set_custom_reduce_scatter(Watched())


class LossScale:
    """Loss scale, dynamic for fp16: halved by a skipped step, doubled after many good ones.

    Any other precision has the exponents of fp32 and needs no scale: 1 forever. Powers of two, so
    that scaling a gradient there and back is exact (Micikevicius et al., arXiv 1710.03740).
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.dynamic = config.dtype == "fp16"
        self.value = config.loss_scale if self.dynamic else 1.0
        self.growth_interval = config.loss_scale_growth
        self.good_steps = 0  # in a row since the scale last changed

    def update(self, stepped: bool) -> None:
        """Update the scale once per optimizer step, after it was applied or left out."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if stepped else 0
        if not stepped:
            self.value = max(LEAST, self.value * 0.5)
        elif self.good_steps >= self.growth_interval:
            self.value, self.good_steps = min(MOST, self.value * 2.0), 0

    def state(self) -> dict[str, float | bool]:
        """Return the state that a resumed run needs."""
        return {"dynamic": self.dynamic, "value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float | bool]) -> None:
        """Restore the state; a run whose precision changed starts with its own scale."""
        if self.dynamic and state["dynamic"]:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
