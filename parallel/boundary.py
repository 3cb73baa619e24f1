"""The accumulation boundary: N microbatches become one set of summed gradients.

It alone decides when FSDP2 reduces gradients, owns the divisor of the loss and of the auxiliary
losses, watches for gradients that aren't finite, and says with all ranks what becomes of a step:

    sums = boundary.accumulate(microbatches)      # .grad of every parameter: the step's gradient
    norm = clip_gradients(..., along=sums.along)  # the one all-reduce that all ranks take part in
    verdict = boundary.judge(sums, norm)          # the one wait for the device
    boundary.conclude(verdict.healthy)            # selection bias of routers, loss scale
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacpp.config import Config
from megacpp.data.batches import Batch
from megacpp.errors import NonFiniteError
from megacpp.model.head import LossSum
from megacpp.model.hybrid import HybridLM
from megacpp.model.m2rnn import M2RNN
from megacpp.model.router import TERMS, Router
from parallel.build import autocast_dtype, stages_of
from parallel.context_layout import ContextLayout
from parallel.guard import NonFiniteGuard
from parallel.loss_scale import LossScale
from parallel.mesh import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from parallel.pipeline import Pipeline


@dataclass(frozen=True)
class Totals:
    """What a step is made of, over all ranks: known before its first forward.

    Attributes:
        valid: labels that count, of each microbatch or, where that is enough, of all.
    """

    tokens: int
    target_bytes: int
    valid: tuple[int, ...]
    microbatches: int

    def divisors(self, rule: str) -> list[int]:
        """What the loss sum of each microbatch is divided by; never 0.

        `tokens`: the valid tokens of the step, so that the loss is their mean. `microbatches`: each
        microbatch is the mean of its own valid tokens, and the step the mean of microbatches, those
        without a valid token included (`grad_accum_steps x num_chunks` of them). Both are the same
        number where microbatches have equally many.
        """
        if rule == "tokens":
            return [max(1, sum(self.valid))] * self.microbatches
        assert len(self.valid) == self.microbatches
        return [self.microbatches * max(1, valid) for valid in self.valid]


@dataclass(frozen=True)
class StepSums:
    """Sums of one step over all ranks and microbatches; still tensors, so nothing waits.

    Attributes:
        along: fp64 numbers of this rank that wait to be summed over all ranks together with the
            gradient norm: values that weren't finite, auxiliary losses, gradients of routers.
    """

    loss_sum: Tensor  # what was differentiated: cross entropy and z-loss
    nll_sum: Tensor  # cross entropy alone, nats
    valid_tokens: int
    tokens: int
    target_bytes: int
    along: Tensor


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of a step, as numbers of the host; the same on every rank.

    Attributes:
        grad_norm: before clipping, of gradients in which what wasn't finite is zero.
        nonfinite: gradient values that weren't finite, over all ranks, before ranks summed theirs.
        healthy: the step may be taken.
        auxiliary: coefficient * mean over tokens of each auxiliary loss that is on, summed over
            layers.
        auxiliary_ratio: norm of the gradient of the auxiliary losses over that of the main loss,
            both of the logits of all routers; None without the one or the other.
    """

    grad_norm: float
    loss_sum: float
    nll_sum: float
    nonfinite: int
    healthy: bool
    auxiliary: dict[str, float]
    auxiliary_ratio: float | None


class AccumulationBoundary:
    """Runs the microbatches of a step; afterwards `.grad` holds the gradient of the mean loss.

    Attributes:
        copies: parameters of which another pipeline stage holds the first copy, with the same
            gradient: a norm over all ranks must not count them.
        loss_scale: what the loss was multiplied with before the backward; 1 except in fp16.
    """

    def __init__(self, model: HybridLM, world: World, config: Config) -> None:
        self.model, self.world, self.train = model, world, config.train
        self.autocast = autocast_dtype(config, world)
        self.units: list[FSDPModule] = []
        self.partial: list[nn.Parameter] = []
        if world.parallel:  # one process never imports FSDP2
            from parallel.fsdp import fsdp_units
            from parallel.tensor import partial_parameters

            self.units, self.partial = fsdp_units(model), partial_parameters(model)
        self.pipeline: Pipeline | None = None
        self.copies: list[nn.Parameter] = []
        if stages := stages_of(model):
            from parallel.pipeline import Pipeline
            from parallel.stages import tied_copies

            self.pipeline, self.copies = Pipeline(stages, world, config), tied_copies(model)
        self.layout = ContextLayout.of(
            config.mesh.cp_order, world.coordinate("cp"), world.degree("cp")
        )
        self.guard = NonFiniteGuard(model, world, stages)
        self.loss_scale = LossScale(config.precision)
        self.routers = [m for m in model.modules() if isinstance(m, Router)]
        self.clips = [m.clip for m in model.modules() if isinstance(m, M2RNN) and m.clip]

    def accumulate(self, microbatches: Iterable[Batch]) -> StepSums:
        """Forward and backward over all microbatches, with one gradient reduction per unit.

        The divisor is known before the first backward; a step without a valid token yields zero
        gradients, not NaN.

        Args:
            microbatches: whole rows; ranks of one context group get the same and take their part.
                They are all taken before the first is run.
        """
        batches = list(microbatches)
        totals = self._totals(batches)
        scale = self.loss_scale.value
        divisors = [divisor / scale for divisor in totals.divisors(self.train.divisor)]
        self._set_scales(totals.tokens)
        self.guard.reset()
        if self.pipeline is not None:
            sums = torch.stack(self.pipeline.accumulate(batches, divisors))
        else:
            sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
            for number, (batch, divisor) in enumerate(zip(batches, divisors, strict=True)):
                self._sync_gradients(last=number == len(batches) - 1)
                out = self._forward(batch)
                (out.loss_sum / divisor).backward()
                sums += torch.stack([out.loss_sum.detach(), out.nll_sum.detach()]).double()
        self.guard.clean_unreduced()
        self._complete_gradients()
        self.world.sum(sums, "loss")
        return StepSums(
            sums[0],
            sums[1],
            sum(totals.valid),
            totals.tokens,
            totals.target_bytes,
            self._numbers_along(),
        )

    def judge(self, sums: StepSums, norm: Tensor) -> Verdict:
        """What becomes of a step whose gradient norm is known; the one wait for the device.

        Args:
            norm: from `clip_gradients`, which has summed `sums.along` over all ranks.

        Raises:
            NonFiniteError: with `train.nonfinite=raise`, saying which ranks and blocks it was.
        """
        losses = torch.stack([sums.loss_sum, sums.nll_sum]).double()
        numbers = torch.cat([norm.double().view(1), losses, sums.along]).tolist()
        (grad_norm, loss_sum, nll_sum, nonfinite), terms = numbers[:4], numbers[4:-2]
        main, own = (math.sqrt(square) if square >= 0 else math.nan for square in numbers[-2:])
        finite = math.isfinite(grad_norm) and math.isfinite(loss_sum)
        clean = finite and not nonfinite
        if not clean and self.train.nonfinite == "raise":
            raise NonFiniteError(
                f"train.nonfinite=raise: gradient norm {grad_norm:g}, loss sum {loss_sum:g}, "
                f"values that are not finite {nonfinite:,.0f}: {self.where() or 'none on a rank'}. "
                "Fix: lower optim.lr, or leave such steps out with train.nonfinite=skip."
            )
        on = {term for router in self.routers for term in router.auxiliary}
        return Verdict(
            grad_norm=grad_norm,
            loss_sum=loss_sum,
            nll_sum=nll_sum,
            nonfinite=int(nonfinite),
            healthy=finite if self.train.nonfinite == "sanitize" else clean,
            auxiliary={
                term: value / sums.tokens
                for term, value in zip(TERMS, terms, strict=True)
                if value or term in on
            },
            auxiliary_ratio=own / main if main > 0 and own > 0 else None,
        )

    def where(self) -> str:
        """Which ranks had values that weren't finite in which part of the model, for a message.

        Every rank must call it; ranks tell each other, and wait.
        """
        found: list[dict[str, int]] = [self.guard.found()]
        if self.world.size > 1:
            found = [{}] * self.world.size
            dist.all_gather_object(found, self.guard.found())
        parts = [
            f"rank {rank}: " + shortened([f"{name} ({count:,})" for name, count in counts.items()])
            for rank, counts in enumerate(found)
            if counts
        ]
        return shortened(parts, "; ")

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> StepSums:
        """The same sums without gradients; every rank must bring as many batches."""
        training = self.model.training
        self.model.eval()
        totals = self._totals(batches)
        if self.pipeline is not None:
            sums = torch.stack(self.pipeline.evaluate(batches))
        else:
            sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
            for batch in batches:
                out = self._forward(batch)
                sums += torch.stack([out.loss_sum, out.nll_sum]).double()
        self.world.sum(sums, "loss")
        self.model.train(training)
        for unit in self.units:  # no backward follows that would: parameters are shards again
            unit.reshard()
        valid, nothing = sum(totals.valid), sums.new_zeros(0)
        return StepSums(sums[0], sums[1], valid, totals.tokens, totals.target_bytes, nothing)

    @torch.no_grad()
    def conclude(self, updated: bool = True) -> None:
        """The end of a step, taken or left out: loss scale, and selection bias of every router.

        The bias moves by the step's counts over all ranks; a step that was left out is forgotten.
        """
        self.loss_scale.update(updated)
        if not self.routers or not updated:
            for router in self.routers:
                router.forget()
            return
        counts = torch.stack([router.tokens_per_expert for router in self.routers])
        self.world.sum(counts, "stage")
        for router, count in zip(self.routers, counts, strict=True):
            router.tokens_per_expert.copy_(count)
            router.update_bias()

    def _forward(self, batch: Batch) -> LossSum:
        if self.layout.degree > 1:
            batch = batch.take(self.layout.index(batch.ids_BT.shape[1]))
        batch = batch.to(self.world.device)
        with self._precision():
            return self.model(batch.ids_BT, batch.labels_BT, batch.docs)

    def _precision(self) -> AbstractContextManager:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.autocast)

    def _totals(self, batches: Sequence[Batch]) -> Totals:
        """Counts over all ranks: one small all-reduce."""
        tokens = sum(batch.ids_BT.numel() for batch in batches)
        target_bytes = sum(batch.target_bytes for batch in batches)
        valid = [batch.num_targets for batch in batches]
        if self.train.divisor == "tokens":
            valid = [sum(valid)]
        counts = torch.tensor([tokens, target_bytes, *valid], device=self.world.device)
        total = self.world.sum(counts, "batch").tolist()
        return Totals(total[0], total[1], tuple(total[2:]), len(batches))

    def _sync_gradients(self, last: bool) -> None:
        """What FSDP2 does in the backward of a microbatch; a pipeline's schedule does it itself.

        Gradients: `defer` and `resident` keep them whole and unreduced until the last backward,
        `each` reduces every microbatch over the shards (replicas are still added up once).
        Parameters: the fp32-contract ones, which are few, are gathered once a step; with `resident`
        all are.
        """
        if not self.units:
            return
        root, mode = self.units[0], self.train.gradient_sync
        if mode == "each":
            root.set_requires_all_reduce(last)
        else:
            root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last, recurse=mode == "resident")

    @torch.no_grad()
    def _complete_gradients(self) -> None:
        """Adds up, over `tp`, the gradients of parameters that each of its ranks has whole.

        Other tokens or other heads made each rank's part. One all-reduce per dtype and step.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in self.partial:
            if p.grad is not None:
                part = p.grad.to_local()  # type: ignore[attr-defined]
                by_dtype.setdefault(part.dtype, []).append(part)
        for parts in by_dtype.values():
            flat = torch.cat([part.flatten() for part in parts])
            self.world.sum(flat, "tp")
            for part, new in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(new.view_as(part))

    def _set_scales(self, tokens: int) -> None:
        """Auxiliary losses, which are sums over tokens, become means; fp16 scales everything."""
        for router in self.routers:
            router.aux_scale.fill_(self.loss_scale.value / tokens)
        for clip in self.clips:
            clip.loss_scale = self.loss_scale.value

    @torch.no_grad()
    def _numbers_along(self) -> Tensor:
        """What is summed over all ranks with the norm; each token's router is on one rank alone."""
        numbers = torch.zeros(1 + len(TERMS) + 2, dtype=torch.float64, device=self.world.device)
        numbers[0] = self.guard.total
        for router in self.routers:
            numbers[1:-2] += router.loss_sums
            numbers[-2:] += router.gradient_squares
        return numbers


def shortened(parts: Sequence[str], between: str = ", ", most: int = 3) -> str:
    """Some of many, in one line."""
    more = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return between.join([*parts[:most], *more])
