"""Accumulation boundary: N microbatches become one set of summed gradients.

It alone decides when FSDP2 reduces gradients, owns the divisor of the loss and of the auxiliary
losses, counts gradients that aren't finite, and agrees with all ranks whether a step is applied:

    sums = boundary.accumulate(microbatches)      # .grad of every parameter: the step's gradient
    norm = clip_gradients(..., along=sums.along)  # the one all-reduce that all ranks take part in
    status = boundary.check_step(sums, norm)      # the one wait for the device
    boundary.finish_step(status)                  # selection bias of routers, loss scale
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacpp.blocks.features import tokens_ahead
from megacpp.blocks.m2rnn.module import M2RNNScan
from megacpp.config.mix import source_folders
from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.errors import NonFiniteError
from megacpp.model.auxiliary import TERMS, AuxiliarySource
from megacpp.model.head import LossSum
from megacpp.model.hybrid import HybridLM
from megacpp.model.stages import BOTH_WAYS
from megacpp.run.step_status import StepStatus
from megacpp.torch_extras import region, to_device
from parallel.build import autocast_dtype, stages_of
from parallel.context.layout import ContextLayout, share
from parallel.expert.load import LoadTable
from parallel.mesh import World
from parallel.step_sums import (
    LossScale,
    NonFiniteGuard,
    StepReduction,
    StepSums,
    Totals,
    microbatch_sums,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from parallel.pipeline import Pipeline


class AccumulationBoundary:
    """Runs the microbatches of a step; afterwards `.grad` holds the gradient of the mean loss.

    Args:
        model: built for `world`.
        world: of the rank.
        config: of the run.
        leaves: whether this rank was told to stop; asked once a step.

    Attributes:
        params: of this rank's part of the model.
        copies: parameters of which another pipeline stage holds the first copy, with the same
            gradient: a norm over all ranks must not count them.
        loss_scale: factor of the loss in the backward; 1 except in fp16.
    """

    def __init__(
        self,
        model: HybridLM,
        world: World,
        config: Config,
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.world, self.train, self.leaves = model, world, config.train, leaves
        self.autocast = autocast_dtype(config, world)
        self.units: list[FSDPModule] = []
        self.partial: list[nn.Parameter] = []
        if world.parallel:  # one process never imports FSDP2
            from parallel.fsdp import fsdp_units
            from parallel.tensor import partial_parameters

            self.units, self.partial = fsdp_units(model), partial_parameters(model)
        self.pipeline: Pipeline | None = None
        self.params = list(model.parameters())
        self.copies: list[nn.Parameter] = []
        if stages := stages_of(model):
            from parallel.pipeline import Pipeline
            from parallel.stages import second_copies

            self.pipeline, self.copies = Pipeline(stages, world, config), second_copies(model)
        self.layout = ContextLayout.for_rank(
            config.mesh.cp_order, world.coordinate("cp"), world.degree("cp")
        )
        self.needs_full_row, self.depths = config.model.needs_full_row, tokens_ahead(config.model)
        self.steps, self.mixed = config.run.steps, list(source_folders(config.data))
        self.guard = NonFiniteGuard(model, world, stages, config.train.nonfinite != "off")
        self.loss_scale = LossScale(config.precision)
        self.sources = [m for m in model.modules() if isinstance(m, AuxiliarySource)]
        alike = 2 if config.mesh.pp_schedule in BOTH_WAYS and stages else 1
        self.loads = LoadTable(model, config.model, alike * world.degree("stage"))
        self.clips = [m.clip for m in model.modules() if isinstance(m, M2RNNScan) and m.clip]

    @region("accumulate")
    def accumulate(self, microbatches: Iterable[Batch], step: int = 0) -> StepSums:
        """Run forward and backward over all microbatches, with one gradient reduction per unit.

        The divisor is known before the first backward; a step without a valid token yields zero
        gradients, not NaN.

        Args:
            microbatches: whole rows; ranks of one context group get the same and take their part.
                They are all taken before the first is run.
            step: number of the optimizer step, for loss weights that change with it.
        """
        batches = list(microbatches)
        assert batches, "a step of no microbatch"
        if self.train.num_chunks > 1:  # the loader's count and the schedule's are two numbers
            batches = [part for batch in batches for part in batch.split(self.train.num_chunks)]
        totals = self._totals(batches)
        divisors = totals.divisors(self.train.divisor) / self.loss_scale.value
        self._set_scales(totals, step)
        self.guard.reset()
        if self.pipeline is not None:
            sums = self.pipeline.accumulate(batches, divisors)
        else:
            sums = self._no_sums()
            for number, (batch, divisor) in enumerate(zip(batches, divisors, strict=True)):
                self._sync_gradients(last=number == len(batches) - 1)
                mine = self._mine(batch)
                with region("forward"):
                    out = self._run(mine)
                with region("backward"):
                    (out.loss_sum / divisor.to(out.loss_sum.dtype)).backward()
                mine.docs.forget()
                sums += microbatch_sums(out, mine)
                del out  # what its graph still holds, before the next one is made
        self.guard.clean_unreduced()
        self._complete_gradients()
        if self.pipeline is not None:
            self.pipeline.sync_copies()
        self.world.sum(sums, "loss")
        return StepSums(sums[0], sums[1], totals, self._numbers_along(sums[:2]), sums[2:])

    @region("check_step")
    def check_step(self, sums: StepSums, norm: Tensor) -> StepStatus:
        """Return statistics of a step, and whether it may be applied; the one wait for the device.

        The decision depends only on numbers that all ranks agree on.

        Args:
            sums: from `accumulate`.
            norm: 0-d, from `clip_gradients`, which has summed `sums.along` over all ranks.

        Raises:
            NonFiniteError: with `train.nonfinite=raise`, naming the ranks and blocks.
        """
        totals = sums.totals
        counts = torch.stack([totals.valid.sum(), totals.target_bytes]).double()
        numbers = torch.cat([norm.double().view(1), sums.nll_sum.view(1), counts, sums.along])
        numbers = torch.cat([numbers, sums.nll_by_source, totals.by_source])
        grad_norm, nll_sum, valid, target_bytes, *along = numbers.tolist()
        along, by_source = along[: len(sums.along)], along[len(sums.along) :]
        nll_S, valid_S = by_source[: len(self.mixed)], by_source[len(self.mixed) :]
        reduced = StepReduction.unpack(along)
        main, own = (math.sqrt(s) if s >= 0 else math.nan for s in reduced.router_squares)
        on = {term for source in self.sources for term in source.auxiliary}
        finite = math.isfinite(grad_norm) and not reduced.bad_losses
        sanitizes = self.train.nonfinite == "sanitize"
        status = StepStatus(
            grad_norm=grad_norm,
            loss=nll_sum / valid if valid else math.nan,
            nll_sum=nll_sum,
            valid_tokens=int(valid),
            tokens=sums.tokens,
            target_bytes=int(target_bytes),
            nonfinite=int(reduced.nonfinite),
            finite=finite,
            healthy=bool(valid) and finite and (sanitizes or not reduced.nonfinite),
            auxiliary={
                term: value / totals.tokens
                for term, value in zip(TERMS, reduced.auxiliary, strict=True)
                if value or term in on
            },
            auxiliary_ratio=own / main if main > 0 and own > 0 else None,
            loads=self.loads.read(reduced.loads) if self.loads.layers else (),
            leaving=int(reduced.leaving),
            loss_scale=self.loss_scale.value if self.loss_scale.dynamic else None,
            loss_by_source={
                name: nll / n for name, nll, n in zip(self.mixed, nll_S, valid_S, strict=True) if n
            },
        )
        if not status.clean and self.train.nonfinite == "raise":
            raise NonFiniteError(
                f"train.nonfinite=raise: {status.trouble}: {self.where() or 'after the sum'}. "
                "Fix: lower optim.lr, or leave such steps out with --train.nonfinite skip."
            )
        return status

    @torch.no_grad()
    def finish_step(self, status: StepStatus | None = None) -> None:
        """End a step that was applied or left out; without a status it counts as applied.

        The loss scale moves, and the selection bias of every router by the step's counts over all
        ranks. Counts of a step that was left out are dropped, and so are those of a step applied
        with zeros: some of its tokens may not have been finite, so their choices mean nothing.
        """
        if status is None or not status.clean or status.healthy:
            self.loss_scale.update(status is None or status.clean)
        routers = self.loads.routers.values()
        if routers and (status is None or (status.healthy and status.clean)):
            counts = torch.stack([router.tokens_per_expert for router in routers])
            self.world.sum(counts, "stage")
            if self.pipeline is not None:
                self.pipeline.sum_counts(counts)
            for router, count in zip(routers, counts, strict=True):
                router.tokens_per_expert.copy_(count)
                router.update_bias()
        for source in self.sources:
            source.forget()

    def where(self) -> str:
        """Return the ranks and parts of the model that had non-finite values, for a message.

        Every rank must call it; the ranks exchange their counts, and wait.
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
    def evaluate(
        self,
        batches: Sequence[Batch],
        watch: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
    ) -> StepSums:
        """Return the sums of batches without gradients; every rank must bring as many batches.

        Args:
            batches: whole rows.
            watch: wraps the iteration, to see each batch before its forward.
        """
        training = self.model.training
        self.model.eval()
        totals = self._totals(batches)
        if self.pipeline is not None:
            sums = self.pipeline.evaluate(watch(batches))
        else:
            sums = self._no_sums()
            for batch in watch(batches):
                mine = self._mine(batch)
                sums += microbatch_sums(self._run(mine), mine)
                mine.docs.forget()
        self.world.sum(sums, "loss")
        self.model.train(training)
        for unit in self.units:  # no backward follows that would: parameters are shards again
            unit.reshard()
        return StepSums(sums[0], sums[1], totals, sums.new_zeros(0), sums[2:])

    def _mine(self, batch: Batch) -> Batch:
        """Return this rank's part of a microbatch."""
        if self.world.degree("cp") == 1:  # whole rows
            batch = batch.to(self.world.device)
            return batch.with_tokens() if self.needs_full_row else batch
        return share(batch, self.layout, self.needs_full_row, self.world.device)

    def _no_sums(self) -> Tensor:
        return torch.zeros(2 + len(self.mixed), dtype=torch.float64, device=self.world.device)

    def _run(self, batch: Batch) -> LossSum:
        with self._precision():
            return self.model(batch.ids_BT, batch.labels_BT, batch.docs)

    def _precision(self) -> AbstractContextManager:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self.autocast)

    def _totals(self, batches: Sequence[Batch]) -> Totals:
        """Sum counts over all ranks: one small all-reduce, for which no rank waits."""
        tokens = sum(batch.ids_BT.numel() for batch in batches) * self.world.degree("batch")
        valid = [batch.num_targets for batch in batches]
        if self.train.divisor == "tokens":
            valid = [sum(valid)]
        target_bytes = sum(batch.target_bytes for batch in batches)
        further = [[batch.num_ahead(k + 1) for batch in batches] for k in range(self.depths)]
        read = [batch.source_targets for batch in batches if batch.source_targets]
        mixed = [sum(column) for column in zip(*read, strict=True)] or [0] * len(self.mixed)
        host = [torch.tensor([target_bytes, *valid, *mixed])]
        host += [torch.stack(of_depth).sum(0, keepdim=True) for of_depth in further]
        counts = to_device(torch.cat(host), self.world.device)
        self.world.sum(counts, "batch")
        labels, by_source, ahead = counts[1:].split([len(valid), len(mixed), self.depths])
        return Totals(tokens, counts[0], labels, len(batches), ahead, by_source)

    def _sync_gradients(self, last: bool) -> None:
        """Set FSDP2's behaviour in a microbatch's backward; a pipeline's schedule does it itself.

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
        """Sum, over `tp`, the gradients of parameters that each of its ranks has whole.

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

    def _set_scales(self, totals: Totals, step: int) -> None:
        """Set the factors that make auxiliary losses, sums over tokens, means; fp16 scales all."""
        scale = self.loss_scale.value / totals.tokens
        for source in self.sources:
            source.aux_scale.fill_(scale * source.gradient_share)
            source.weigh(totals.tokens, totals.ahead, step, self.steps)
        for clip in self.clips:
            clip.loss_scale = self.loss_scale.value

    @torch.no_grad()
    def _numbers_along(self, sums: Tensor) -> Tensor:
        """Return the numbers to sum over all ranks with the norm, `StepReduction` packed."""
        device = self.world.device
        auxiliary = torch.zeros(len(TERMS), dtype=torch.float64, device=device)
        for source in self.sources:
            auxiliary += source.loss_sums * source.record_share
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for router in self.loads.routers.values():
            squares += router.gradient_squares
        return StepReduction.pack(
            self.guard.total,
            (~sums.isfinite()).sum(),
            self.leaves(),
            auxiliary,
            squares,
            self.loads.numbers(device) if self.loads.layers else sums.new_zeros(0),
        )


def shortened(parts: Sequence[str], between: str = ", ", most: int = 3) -> str:
    """Return the first `most` of some texts in one line, and the number of the others."""
    more = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return between.join([*parts[:most], *more])
