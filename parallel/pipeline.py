"""Pipeline parallelism: the microbatches of a step through all stages, by a schedule of torch.

The schedule alone decides when a stage's gradients are reduced over the data axes (FSDP2), so all
microbatches of an optimizer step are one `schedule.step`, and nothing else toggles gradient sync.
Shapes between stages are given beforehand, so that every microbatch is run forward exactly once:
torch would otherwise infer them with a forward and a backward more, which routers would count.

`zbv` and `dualpipev` make gradients of inputs and of weights in two walks over one graph, between
which gathered weights must stay, so their units aren't resharded after the forward. A recomputed
block is recomputed in each of these walks: two to four forwards a microbatch (pytorch#136766).

Legend: B rows, T tokens of a whole row, t tokens of this rank, D model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

from megacpp.config.mix import source_folders
from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.model.precision import compute_dtype
from megacpp.model.stage_actions import answered, from_torch
from megacpp.model.stages import (
    BOTH_WAYS,
    SPLIT_BACKWARD,
    microbatches_through,
    owners,
    stages_per_rank,
    walks_once,
)
from parallel.context.layout import ContextLayout, share
from parallel.dualpipe import ROOM, ScheduleDualPipe, number_of
from parallel.handoff import ChoiceHandoff
from parallel.mesh import World
from parallel.sends import SendingStage
from parallel.stages import Stage, has_embedding_copy

SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved_zb": schedules.ScheduleInterleavedZeroBubble,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
    "dualpipe": ScheduleDualPipe,
}
# Before torch 2.13 a walk for weights alone refuses autograd functions and counts gradients twice.
APART = torch.__version__ >= "2.13"  # pytorch#166577


class Pipeline:
    """This rank's stages among those of its `pp` group.

    Every rank of the group brings the same batches; only the ends read ids and labels.

    Args:
        stages: of this rank, in the order in which a token meets them; sharded already.
        dry: there are no peers (a fake process group, maybe fake tensors): ranks don't first
            agree that shapes are known, which would read a number that they exchange.
    """

    def __init__(
        self, stages: Sequence[Stage], world: World, config: Config, dry: bool = False
    ) -> None:
        self.stages, self.world, self.mesh, self.dry = list(stages), world, config.mesh, dry
        self.rank = world.coordinate("pp")
        self.owners = owners(config.mesh.pp_schedule, world.degree("pp"))
        self.both_ways = config.mesh.pp_schedule in BOTH_WAYS
        self.tied = has_embedding_copy(config.model) and self.owners[0] != self.owners[-1]
        self.model, self.dtype = config.model, compute_dtype(config.precision, world.device)
        self.needs_full_row = config.model.needs_full_row
        self.sources = len(source_folders(config.data))
        self.layout = ContextLayout.for_rank(
            config.mesh.cp_order, world.coordinate("cp"), world.degree("cp")
        )
        self.choices = ChoiceHandoff(config.model, world)
        for stage in self.stages:
            stage.choices = self.choices
        for before, after in pairwise(self.stages):
            # the bottom of a V: nothing is sent
            if after.part.index == before.part.index + 1 and not after.part.back:
                after.taken = before.handed
        self._built: tuple[tuple[int, ...], Any, list[SendingStage]] | None = None
        if self.mesh.pp_schedule in SPLIT_BACKWARD:
            for unit in self.units():
                unit.set_reshard_after_forward(False)
            if not APART:
                warnings.warn(
                    f"mesh.pp_schedule={self.mesh.pp_schedule}: torch {torch.__version__} makes "
                    "gradients of inputs and weights together, so bubbles stay; torch 2.13 splits",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def accumulate(self, microbatches: Sequence[Batch], divisors: Tensor) -> Tensor:
        """Run forward and backward over all microbatches; `.grad` then holds reduced gradients.

        What another rank has a copy of still has those of this rank alone: `sync_copies`.
        Auxiliary losses are scaled by the routers' `aux_scale`, in every stage.

        Args:
            microbatches: whole rows, all of one shape; another number than in the step before
                makes a new schedule.
            divisors: fp64 `[microbatches]`, by which the loss sum of each is divided.

        Returns:
            Loss sum and cross entropy sum of these microbatches, fp64, on every rank of `pp`.
        """
        shape = (len(microbatches), *microbatches[0].ids_BT.shape)
        if self._built is None or self._built[0] != shape:
            self._built = shape, *self._schedule(*shape)
        half = microbatches_through(self.mesh.pp_schedule, len(microbatches))
        args, target = (), divisors[:half]
        for back in sorted({stage.part.back for stage in self.stages}):
            share_of, mine = slice(half * back, half * (back + 1)), self._going(back)
            ids_Bt = self._bring(microbatches[share_of], mine)
            if any(stage.part.first for stage in mine):
                args = (ids_Bt,)
            if any(stage.part.last for stage in mine):
                target = divisors[share_of]
        for stage in self.stages:
            if stage.lender is not None and isinstance(unit := stage.lender, FSDPModule):
                # The borrower's backwards come first, and the schedule sets its own flags alone.
                unit.set_is_last_backward(False)
                unit.set_requires_gradient_sync(False)
                unit.set_reshard_after_backward(False)
        with _errors_of_stages():
            self._built[1].step(*args, target=target, return_outputs=False)
        for sender in self._built[2]:
            sender.settle()
        for stage in self.stages:
            stage.forget()
        return self._sums()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Return the sums of batches, forward only; each rank of `pp` brings as many batches.

        One batch after the other goes through the stages: with two stages a rank waits for a
        batch's second visit before it takes the next, so that sends and receives of two ranks
        are always in the same order.
        """
        for stage in self.stages:
            for unit in (stage.lender, getattr(stage.lender, "embed", None)):  # the root first
                if isinstance(unit, FSDPModule):  # both ways, no forward of the lender comes first
                    unit.unshard()
        for batch in batches:
            self._forward(batch)
            for stage in self.stages:
                stage.forget()
        for unit in self.units():  # no backward follows that would
            unit.reshard()
        return self._sums()

    def units(self) -> list[FSDPModule]:
        """Return every FSDP unit of this rank's stages, roots included."""
        found = (module for stage in self.stages for module in stage.modules())
        return [module for module in found if isinstance(module, FSDPModule)]

    def _going(self, back: bool) -> list[Stage]:
        """Return this rank's stages of microbatches that go `back`, to the first rank, or not."""
        return [stage for stage in self.stages if stage.part.back == back]

    def _schedule(
        self, microbatches: int, rows: int, tokens: int
    ) -> tuple[Any, list[SendingStage]]:
        """Return the schedule for microbatches of `rows` x `tokens` tokens, and its stages."""
        pp, name = self.world.degree("pp"), self.mesh.pp_schedule
        built = [
            SendingStage(
                stage,
                number_of(stage.part.index, pp, stage.part.back),
                ROOM * pp if self.both_ways else len(self.owners),
                self.world.device,
                input_args=self._example(stage.part.first, False, rows, tokens),
                output_args=self._example(False, stage.part.last, rows, tokens),
                group=self.world.group("pp"),
                dw_builder=_nothing_left if self._walks_once(stage) else None,
                buffer=partial(self.choices.buffer, rows, tokens),
                greets=not self.dry,
                batched=name == "1f1b",
            )
            for stage in self.stages
        ]
        looped = stages_per_rank(name) > 1
        schedule: Any = SCHEDULES[name](
            built if looped else built[0],  # type: ignore[arg-type]
            n_microbatches=microbatches,
            loss_fn=_mean_loss,
            scale_grads=False,
        )
        if self.dry and hasattr(schedule, "_warmup_p2p"):
            schedule._warmup_p2p = _shapes_are_known
        if looped:
            for stage in built:
                stage.answered = answered(from_torch(schedule.pipeline_order), stage.stage_index)
        return schedule, built

    def _walks_once(self, stage: Stage) -> bool:
        """Whether a split backward makes the gradients of weights with those of inputs."""
        if stage.part.back and stage.part.first:
            return True  # torch defers it for stage 0 alone
        split = self.mesh.pp_schedule in SPLIT_BACKWARD
        return split and (not APART or walks_once(self.model, self.mesh, stage.part))

    def _example(self, ids: bool, loss: bool, rows: int, tokens: int) -> Tensor:
        """Return an input or output of a stage, on the meta device."""
        t = tokens // self.layout.degree
        if ids:
            return torch.empty(rows, t, dtype=torch.int64, device="meta")
        if loss:
            wide = torch.promote_types(self.dtype, torch.float32)  # torch 2.11 compares it
            return torch.empty((), dtype=wide, device="meta", requires_grad=True)
        return torch.empty(
            self._hidden_shape(rows, tokens), dtype=self.dtype, device="meta", requires_grad=True
        )

    def _hidden_shape(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Return the shape that one rank sends to the next stage: its tokens between blocks."""
        t = tokens // (self.layout.degree * self.world.degree("tp"))
        return (rows, t, *self.model.stream_dims)

    def _bring(self, batches: Sequence[Batch], stages: Sequence[Stage]) -> Tensor:
        """Give stages this rank's part of the batches; return their ids, stacked."""
        shape = batches[0].ids_BT.shape
        assert all(batch.ids_BT.shape == shape for batch in batches), "microbatches of two shapes"
        assert all(batch.docs.row is None for batch in batches), "batches of whole rows"
        mine = [share(b, self.layout, self.needs_full_row, self.world.device) for b in batches]
        for stage in stages:
            stage.expect(mine)
            stage.hands_on = torch.Size(self._hidden_shape(*shape)), self.dtype
        return torch.cat([batch.ids_BT for batch in mine])

    def _forward(self, batch: Batch) -> None:
        """Run one batch through this rank's stages; both ways: from the first rank to the last."""
        stages = self._going(back=False)
        x = self._bring([batch], stages)
        group, shape = self.world.group("pp"), batch.ids_BT.shape
        for stage in stages:
            part = stage.part
            if not part.first and (source := self.owners[part.index - 1]) != self.rank:
                hidden = self._hidden_shape(*shape)
                x = torch.empty(hidden, dtype=self.dtype, device=self.world.device)
                for t in (x, *stage.arriving(partial(self.choices.buffer, *shape))):
                    dist.recv(t, group=group, group_src=source)
            x = stage(x)
            if not part.last and (target := self.owners[part.index + 1]) != self.rank:
                for t in (x.contiguous(), *stage.leaving()):
                    dist.send(t, group=group, group_dst=target)

    def _sums(self) -> Tensor:
        """Return `[2 + S]`, sums of the last stage since the last call, on every rank of `pp`."""
        sums = torch.zeros(2 + self.sources, dtype=torch.float64, device=self.world.device)
        for stage in self.stages:
            for of_batch in stage.sums:
                sums += of_batch
            stage.sums.clear()
        return self.world.sum(sums, "pp")

    @torch.no_grad()
    def sync_copies(self) -> None:
        """Sum gradients of weights that another rank of `pp` has a copy of, with those of its copy.

        Both then hold the same gradient, so equal weights stay equal (`second_copies` of
        parallel/stages.py names those that must not count in a norm).
        """
        shared = []
        if self.both_ways:
            in_order = sorted(self.stages, key=lambda stage: stage.part.index)
            shared = [p for stage in in_order for p in stage.parameters()]
        elif self.tied and self.rank in (self.owners[0], self.owners[-1]):
            shared = [_tied_weight(self.stages)]
        for p in shared:
            if p.requires_grad:
                if p.grad is None:  # multi-token prediction that the trunk learns nothing from
                    p.grad = torch.zeros_like(p)
                self._add_peers(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)

    def sum_counts(self, counts: Tensor) -> None:
        """Add the counts of routers of a rank that has the same ones, in place, if one has.

        Args:
            counts: of any shape.
        """
        if self.both_ways:
            self._add_peers(counts)

    def _add_peers(self, own: Tensor) -> None:
        """Add the tensor of the rank with copies to this rank's, in place, and the other way."""
        if not own.numel():  # nor has the peer, which holds the same shard
            return
        ends = self.owners[0], self.owners[-1]
        peer = ends[0] + ends[1] - self.rank  # both ways each of two ranks has the other's stages
        other, group = torch.empty_like(own), self.world.group("pp")
        exchange = [
            dist.P2POp(dist.isend, own, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        own.add_(other)  # a + b is b + a: the same bits on both


def _tied_weight(stages: Sequence[Stage]) -> nn.Parameter:
    """Return the tied weight of the first or last stage, in its embedding or its head."""
    stage = stages[0] if stages[0].part.first else stages[-1]
    module = stage.get_submodule("embed" if hasattr(stage, "embed") else "head")
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _mean_loss(loss_sum: Tensor, divisor_1: Tensor) -> Tensor:
    """Return the part of one microbatch in the mean loss of the step, for the schedule."""
    return loss_sum / divisor_1[0].to(loss_sum.dtype)


def _nothing_left() -> Callable[[], None]:
    """Return no deferred weight gradients: this stage computes all of them together.

    Of the last one always: the fused loss makes its gradients in the forward and scales them in
    place, so that its graph can be walked only once. So can that of an exchange over `cp` whose
    sends and receives are steps of the graph: ranks of `cp` run the same actions in the same order,
    and within one walk autograd reverses the order of the forward on each.
    """
    return lambda: None


def _shapes_are_known(stages: list[PipelineStage], has_backward: bool, p2p_done: bool) -> None:
    """Replace the vote of a schedule's ranks on whether shapes are known beforehand."""
    from torch.distributed.pipelining.stage import InferenceMode  # from torch 2.12 on

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


@contextmanager
def _errors_of_stages() -> Iterator[None]:
    """Raise the error of a stage itself, without the schedule's account and log of all actions."""
    log = logging.getLogger(schedules.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None:
            raise
        raise cause from cause.__cause__
    finally:
        log.setLevel(level)
