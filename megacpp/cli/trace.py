"""Memory trace of a rank's whole step, on the trainer's own model without values or peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.graphs import TracedGraphs
from checkpointing.tracing.host_ledger import HostLedger
from checkpointing.tracing.meter import local_part
from checkpointing.tracing.recorder import Recorder
from megacpp.cli.measure import reshards, short
from megacpp.config.schema import Config
from megacpp.data.batches import Batch
from megacpp.kernels.backend import set_kernels
from megacpp.memory.compose import Whole, compose, shallow
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.pipeline import buffer_bytes
from megacpp.memory.stream import Stream, StreamBlock
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.model.stages import BOTH_WAYS, as_scheduled, num_stages
from optim import offload
from optim.build import build_optimizer
from optim.clip import clip_gradients
from optim.qk_clip import QKClip
from parallel.boundary import AccumulationBoundary
from parallel.mesh import World
from parallel.simulate.fake import (
    FakeBoundary,
    as_trained,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
)
from parallel.simulate.gpu_stand_ins import on_gpu
from parallel.simulate.traced_kernels import traced_kernels

MICROBATCHES = 3  # one makes gradients, one adds to all of them, and the last one reduces them

Stage = Callable[[str], AbstractContextManager[None]]


def _no_stage(name: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Trainee:
    """Objects that train.py builds for a model and that own memory, with their step."""

    model: HybridLM
    optimizer: torch.optim.Optimizer
    boundary: AccumulationBoundary
    qk_clip: QKClip | None

    @classmethod
    def build(
        cls, model: HybridLM, world: World, config: Config, boundary: type[AccumulationBoundary]
    ) -> Trainee:
        """Build optimizer, boundary and QK-clip of a model.

        Args:
            model: planned model.
            world: fake world.
            config: configuration of the run.
            boundary: class of the accumulation boundary.
        """
        tau = config.optim.qk_clip
        return cls(
            model,
            build_optimizer(model, config, world.holders),
            boundary(model, world, config),
            QKClip(model, tau, lambda logits: world.max(logits, "world")) if tau else None,
        )

    def first_step(self, config: Config, stage: Stage = _no_stage, optimizes: bool = True) -> None:
        """Run a step of few tokens: FSDP2 allocates persistent buffers when it first runs."""
        count = 1 if config.mesh.pp == 1 else microbatches(config)
        self.step(short(config), count, stage, optimizes)

    def step(
        self, config: Config, microbatches: int, stage: Stage = _no_stage, optimizes: bool = True
    ) -> None:
        """Run a step of `microbatches` microbatches, of the configured size.

        Args:
            config: configuration of the run.
            microbatches: number of microbatches.
            stage: context that marks a part of the step.
            optimizes: run the optimizer; else gradients are freed unused.
        """
        boundary = self.boundary
        sums = boundary.accumulate(_batches(config, microbatches, stage))
        with stage("clip"):
            clip_gradients(
                self.model.parameters(),
                config.optim.clip_norm,
                copies=boundary.copies,
                along=sums.along,
                loss_scale=boundary.loss_scale.value,
            )
        with stage("optimizer"):
            if optimizes:
                self.optimizer.step()
                if self.qk_clip is not None:
                    self.qk_clip.clip()
        self.optimizer.zero_grad()
        boundary.finish_step()


def trace_step(config: Config, size: int, rank: int = 0, full: bool = False) -> Stream:
    """Return every allocation of one optimizer step of rank `rank` of `size`.

    For a GPU (train.device=cuda, as megacpp/memory/budget.py resolves `auto`) the kernels are those
    of `traced_kernels`, else torch's. The first layer, one of each kind and the last one run; the
    whole model is composed from them (megacpp/memory/compose.py). A stage of a pipeline has buffers
    for the microbatches that don't run, too.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        rank: rank to trace.
        full: run all layers.
    """
    config = as_trained(as_scheduled(config), compiled=True)
    stream = _traced_step(config, size, rank, full)
    ran = replace(config, train=replace(config.train, grad_accum=microbatches(config)))
    all_buffers, buffers = (buffer_bytes(LocalShapes.on_rank(c, size, rank)) for c in (config, ran))
    if all_buffers > buffers:
        name = "buffers of microbatches that didn't run"
        stream.rest(StreamBlock(all_buffers - buffers, "communication", "", name))
    return stream


def _traced_step(config: Config, size: int, rank: int, full: bool) -> Stream:
    """Return the stream of a step of few microbatches; see `trace_step`."""
    few = None if full or not _composes(config) else shallow(config, size, rank)
    if few is None:
        with fake_world(config, size, rank) as world:
            return _traced(config, world)[0]
    with fake_world(config, size, rank) as world:
        cells: list[int] = []
        model = planned_model(config, world, lambda cut: cells.append(_block_cells(cut)))
        with on_gpu() if _gpu(config) else nullcontext():
            needed = build_optimizer(model, config, world.holders).transient_bytes()
        reshard, root_cells = reshards(config, world, cells.pop), _root_cells(model)
    config = replace(config, model=few.model, mesh=replace(config.mesh, reshard=reshard))
    with fake_world(config, size, rank) as world:
        stream, recorder = _traced(config, world, optimizes=False)
        root = root_cells / max(1, _root_cells(recorder.model))
    return compose(stream, Whole(few.parts, root, needed, frozenset(recorder.first_alone)))


def traced_blocks(config: Config, size: int, rank: int, full: bool) -> int:
    """Return the approximate number of forwards of blocks in `trace_step`, for its progress.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        rank: rank to trace.
        full: run all layers.
    """
    few = None if full or not _composes(config) else shallow(config, size, rank)
    model = config.model if few is None else few.model
    return model.depth // config.mesh.pp * microbatches(config)


def trace_run(config: Config, size: int, steps: int = 2) -> Stream:
    """Return every allocation of rank 0, from the weights on, for `steps` steps of all layers.

    The optimizer's state is allocated after the first backward, in gaps that activations left.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        steps: number of steps.
    """
    config = as_trained(as_scheduled(config), compiled=True)
    with fake_world(config, size) as world:
        model = planned_model(config, world, prepared(config))
        fake = fake_tensors(memory=True, gpu=_gpu(config))
        with fake, Recorder(model) as recorder, _moments_on_host(recorder):
            model.to_empty(device=world.device)
            model.train()
            trainee = Trainee.build(model, world, config, FakeBoundary)
            for step in range(steps):
                recorder.mark(f"step {step + 1}")
                trainee.step(config, microbatches(config), recorder.stage)
            recorder.name_resting(trainee.optimizer)
            return recorder.stream()


def _composes(config: Config) -> bool:
    """Return whether layers are independent in memory and the optimizer is a plain one."""
    optim, recompute = config.optim, config.recompute
    plain = optim.adamw_state == "fp32" and not optim.cautious_weight_decay
    return plain and recompute.offload == "none" and not recompute.compress


def _traced(config: Config, world: World, optimizes: bool = True) -> tuple[Stream, Recorder]:
    """Return the stream of a traced step and its recorder, with all layers of `config`."""
    ac = ActivationCheckpointing(config)
    buffers = HostLedger.instead(ac)
    model = planned_model(config, world, prepared(config, ac))
    fake = fake_tensors(memory=True, every_chunk=False, gpu=_gpu(config))
    with fake, Recorder(model, buffers) as recorder, _moments_on_host(recorder):
        model.to_empty(device=world.device)
        model.train()
        trainee = Trainee.build(model, world, config, FakeBoundary)
        if config.mesh.pp > 1:
            trainee.first_step(config, recorder.stage, optimizes)
        elif world.parallel:
            gather_once(model)
        recorder.begin(trainee.optimizer)
        trainee.step(config, microbatches(config), recorder.stage, optimizes)
        return recorder.stream(), recorder  # while the optimizer and its state are alive


@contextmanager
def _moments_on_host(recorder: Recorder) -> Iterator[None]:
    """Let `optim.adamw_state=cpu_offload` run without a GPU; its host memory isn't counted."""
    before = offload._host_buffer, offload._mark
    offload._host_buffer = lambda t: recorder.on_host(torch.empty_like(t))
    offload._mark = lambda t: None
    try:
        yield
    finally:
        offload._host_buffer, offload._mark = before


def prepared(
    config: Config, ac: ActivationCheckpointing | None = None
) -> Callable[[HybridLM], None]:
    """Return the function that prepares the blocks of a traced model before they are sharded.

    Args:
        config: configuration of the run.
        ac: applies the recompute policy; by default that of `config`.
    """
    kernels, ac = traced_kernels(config), ac or ActivationCheckpointing(config)
    ac.graphs = TracedGraphs

    def prepare(model: HybridLM) -> None:
        set_kernels(model, kernels)
        ac(model)

    return prepare


def _gpu(config: Config) -> bool:
    return config.train.device == "cuda"


def gather_once(model: HybridLM) -> None:
    """Make FSDP2 allocate the buffers that it keeps from its first gathering on."""
    from parallel.fsdp import fsdp_units

    for number, unit in enumerate(fsdp_units(model)):
        if number == 0:
            unit._get_fsdp_state()._lazy_init()  # the root; a forward would do it
        unit.unshard()
        unit.reshard()


def microbatches(config: Config) -> int:
    """Return the fewest microbatches that show the peak; each stage needs a backward."""
    config = as_scheduled(config)
    stages = num_stages(config.mesh.pp_schedule, config.mesh.pp)
    ways = 2 if config.mesh.pp_schedule in BOTH_WAYS else 1  # each with its own microbatches
    most = MICROBATCHES if config.mesh.pp == 1 else 2 * stages * ways
    return (
        config.train.grad_accum
        if config.mesh.pp_schedule in ("gpipe", "looped_bfs") and stages > 1
        else min(most, config.train.grad_accum)
    )


def _block_cells(model: HybridLM) -> int:
    """Return the cells of an unsharded model, without those that the root unit gathers."""
    contract = {p for _, p in contract_parameters(model)}
    return sum(local_part(p).numel() for p in model.parameters() if p not in contract)


def _root_cells(model: torch.nn.Module) -> int:
    """Return the cells of this rank's shards of the root unit, padded."""
    total = 0
    for _, p in contract_parameters(model):
        cuts = 1
        if isinstance(p, DTensor):
            cuts = math.prod(
                p.device_mesh.size(i) for i, at in enumerate(p.placements) if not at.is_replicate()
            )
        total += -(-p.shape[0] // cuts) * p.shape[1:].numel() if p.ndim else 1
    return total


def _batches(config: Config, count: int, stage: Stage) -> Iterator[Batch]:
    with stage("batch"):
        batches = [fake_batch(config)] * count
    while batches:
        yield batches.pop()
