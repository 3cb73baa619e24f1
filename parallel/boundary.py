"""The accumulation boundary: N microbatches become one set of summed gradients.

It alone toggles FSDP2 gradient sync, owns the divisor of the loss (global valid tokens of the
step), scales auxiliary losses, and advances the routers' selection bias once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megacpp.config import Config
from megacpp.data.batches import Batch
from megacpp.model.head import LossSum
from megacpp.model.hybrid import HybridLM
from megacpp.model.router import Router
from parallel.build import autocast_dtype, stages_of
from parallel.context_layout import ContextLayout
from parallel.mesh import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from parallel.pipeline import Pipeline


@dataclass(frozen=True)
class StepSums:
    """Sums of one step over all ranks and microbatches; still tensors, so nothing waits."""

    loss_sum: Tensor  # what was differentiated: cross entropy and z-loss
    nll_sum: Tensor  # cross entropy alone, nats
    valid_tokens: int
    tokens: int
    target_bytes: int


class AccumulationBoundary:
    """Runs the microbatches of a step; afterwards `.grad` holds the gradient of the mean loss.

    Attributes:
        copies: parameters of which another pipeline stage holds the first copy, with the same
            gradient: a norm over all ranks must not count them.
    """

    def __init__(self, model: HybridLM, world: World, config: Config) -> None:
        self.model, self.world, self.mesh = model, world, config.mesh
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
        self.routers = [m for m in model.modules() if isinstance(m, Router)]

    def accumulate(self, microbatches: Sequence[Batch]) -> StepSums:
        """Forward and backward over all microbatches, with one gradient reduction per unit.

        The divisor (valid tokens over all ranks and microbatches) is known before the first
        backward; a step without a valid token yields zero gradients, not NaN.

        Args:
            microbatches: whole rows; ranks of one context group get the same and take their part.
        """
        tokens, valid, target_bytes = self._totals(microbatches)
        self._scale_auxiliary(1.0 / tokens)
        if self.pipeline is not None:
            sums = torch.stack(self.pipeline.accumulate(microbatches, valid))
        else:
            sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
            for number, batch in enumerate(microbatches):
                self._sync_gradients(last=number == len(microbatches) - 1)
                out = self._forward(batch)
                (out.loss_sum / max(1, valid)).backward()
                sums += torch.stack([out.loss_sum.detach(), out.nll_sum.detach()]).double()
        self._complete_gradients()
        self.world.sum(sums, "loss")
        return StepSums(sums[0], sums[1], valid, tokens, target_bytes)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> StepSums:
        """The same sums without gradients; every rank must bring as many batches."""
        training = self.model.training
        self.model.eval()
        tokens, valid, target_bytes = self._totals(batches)
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
        return StepSums(sums[0], sums[1], valid, tokens, target_bytes)

    @torch.no_grad()
    def update_routers(self, updated: bool = True) -> None:
        """Selection bias of every router, from the step's counts summed over all ranks.

        A step that was skipped (`updated` False) only forgets its counts.
        """
        if not updated:
            for router in self.routers:
                router.tokens_per_expert.zero_()
        if not self.routers or not updated:
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

    def _totals(self, batches: Sequence[Batch]) -> tuple[int, int, int]:
        """Tokens, valid tokens and target bytes over all ranks: one small all-reduce."""
        tokens = sum(batch.ids_BT.numel() for batch in batches)
        valid = sum(batch.num_targets for batch in batches)
        counts = torch.tensor([tokens, valid, sum(batch.target_bytes for batch in batches)])
        total = self.world.sum(counts.to(self.world.device), "batch").tolist()
        return total[0], total[1], total[2]

    def _sync_gradients(self, last: bool) -> None:
        """Only the last backward of a step reduces gradients and lets go of the root's unit.

        So the fp32-contract parameters, which are few, are gathered once a step, not once a
        microbatch.
        """
        if self.units:
            root = self.units[0]
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(last, recurse=self.mesh.reshard == "resident")

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

    def _scale_auxiliary(self, scale: float) -> None:
        for router in self.routers:
            router.aux_scale.fill_(scale)
