"""Activation memory of a rank, measured on the trainer's own model without values or peers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from checkpointing.apply import ActivationCheckpointing
from checkpointing.tracing.activations import (
    Activations,
    Kept,
    Part,
    Standing,
    activations,
    one_of_each,
    standing_for,
)
from checkpointing.tracing.host_ledger import HostLedger
from checkpointing.tracing.meter import Meter, local_part, part_of
from megacpp.blocks.features import FEATURES
from megacpp.blocks.hyper_connections.groups import places_in_groups, stream_groups
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config, MeshConfig
from megacpp.model.fp32 import contract_parameters
from megacpp.model.hybrid import HybridLM
from megacpp.model.pattern import ENTRANCE, EXIT
from megacpp.model.precision import compute_dtype
from megacpp.model.stages import SPLIT_BACKWARD, StagePart, as_scheduled, stage_parts
from parallel.mesh import DENSE, World
from parallel.simulate.fake import (
    FakeBoundary,
    as_trained,
    fake_batch,
    fake_tensors,
    fake_world,
    planned_model,
)

Reshard = Literal["auto", "always", "never"]


def measure(config: Config, size: int, rank: int, full: bool = False) -> Activations:
    """Return the activations that one microbatch saves on rank `rank` of `size`.

    The builder's model runs forward and backward under fake tensors (parallel/simulate/fake.py),
    with one layer of each kind and the last one; in a pipeline, the layers of this rank's stages
    count.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        rank: rank to measure.
        full: run all layers.
    """
    given, place = config, (size, rank)
    config, mesh = as_trained(as_scheduled(config)), config.mesh
    # Layers of a kind differ by their position in a group.
    full = full or bool(stream_groups(config))
    traced = config.model if full else one_of_each(config.model)
    standing, stages = standing_for(traced, config.model), []
    if mesh.pp > 1:  # a stage is a model on a pp-th of the ranks
        size, stage = size // mesh.pp, rank // (size // mesh.pp)
        rank, stages = rank % size, stage_parts(config.model, mesh, stage)
        standing = [place for part in stages for place in _of_stage(standing, part)]
    few = replace(config, model=traced, mesh=replace(mesh, pp=1))
    with fake_world(few, size, rank, meshes=mesh.pp > 1) as world:
        few = replace(few, mesh=replace(few.mesh, reshard=_reshard(few, config, world, standing)))
        ac = ActivationCheckpointing(few)
        if full:  # groups depend on stages, which this model lacks
            ac.groups = places_in_groups(config)
        HostLedger.instead(ac)
        model = planned_model(few, world, ac)
        with fake_tensors(memory=True):
            found = activations(run(few, world, model, ac), standing)
    if found.host_bytes > config.recompute.offload_host_gib * 2**30 and not full:
        return measure(given, *place, full=True)  # each offload depends on the previous ones
    received = [_received(config, world) for part in stages if not part.first]
    parts = found.parts if given.train.device == "cpu" else map(_as_on_gpu, found.parts)
    return replace(found, parts=(*received, *parts))


def _as_on_gpu(part: Part) -> Part:
    """Rename operators that have a separate implementation on a CPU to their GPU names."""
    kept = (replace(one, operator=one.operator.removesuffix("_for_cpu")) for one in part.kept)
    return replace(part, kept=tuple(kept))


def microbatches_in_flight(config: Config, size: int, rank: int) -> int | None:
    """Return the most forwards whose backward is still to come; None for an unknown schedule."""
    mesh, total = config.mesh, as_scheduled(config).train.grad_accum
    if mesh.pp == 1:
        return 1
    stage = rank // (size // mesh.pp)
    return {"1f1b": min(total, mesh.pp - stage), "gpipe": total}.get(mesh.pp_schedule)


def coordinates(mesh: MeshConfig, size: int, rank: int) -> dict[str, int]:
    """Return the coordinate of a rank on each axis; empty for one process."""
    found, left = {"ep": rank % mesh.ep}, rank
    for axis in reversed(DENSE):
        left, found[axis] = divmod(left, getattr(mesh, axis))
    return {axis: found[axis] for axis in (*DENSE, "ep")} if size > 1 else {}


def run(config: Config, world: World, model: HybridLM, ac: ActivationCheckpointing) -> Meter:
    """Run one microbatch on fake tensors as the boundary does, and return its meter.

    Args:
        config: configuration of the shortened model.
        world: fake world.
        model: planned model.
        ac: recomputation of the model.
    """
    model.to_empty(device=world.device)
    model.train()
    boundary = FakeBoundary(model, world, config)
    if world.parallel:  # FSDP2 allocates persistent buffers when it first runs
        boundary.accumulate([fake_batch(short(config))])
        model.zero_grad()
    batch = fake_batch(config)
    host = ledger.buffers if isinstance(ledger := ac.offloader, HostLedger) else tuple
    with Meter(model, host) as meter:
        boundary.accumulate([batch])
    return meter


def short(config: Config) -> Config:
    """Return the configuration with the shortest rows that every rank and convolution accepts."""
    model, mesh = config.model, config.mesh
    taps = [kind.context.taps(model) for kind in KINDS.values() if kind.context]
    each = max(16, *taps, *(one.taps(model) for one in FEATURES.values() if one.present(model)))
    tokens = min(config.data.seq_len, 2 * mesh.cp * mesh.tp * each)
    return replace(config, data=replace(config.data, seq_len=tokens))


def _of_stage(standing: Sequence[Standing], part: StagePart) -> list[Standing]:
    """Return the layers of a pipeline stage among those of the model."""
    ahead = [place for place in standing if place[0] in ENTRANCE]
    behind = [place for place in standing if place[0] in EXIT]
    blocks = standing[len(ahead) : len(standing) - len(behind)]
    here = [blocks[layer] for layer in part.layers]
    return [*(ahead if part.first else []), *here, *(behind if part.last else [])]


def _received(config: Config, world: World) -> Part:
    """Return the activation that a stage receives from the one before, saved by its first norm."""
    dtype = compute_dtype(config.precision, world.device)
    tokens = config.data.seq_len // (config.mesh.cp * config.mesh.tp)
    shape = (config.train.device_batch_size, tokens, *config.model.stream_dims)
    name, size = str(dtype).removeprefix("torch."), math.prod(shape) * dtype.itemsize
    return Part("received", 1, (Kept("recv", "", shape, name, 1, size),), 0, 0, 0)


def _reshard(few: Config, config: Config, world: World, standing: Sequence[Standing]) -> Reshard:
    """Return whether the model frees gathered parameters, which depends on its size."""
    if config.mesh.pp > 1 and config.mesh.pp_schedule in SPLIT_BACKWARD:
        return "never"
    sizes: Counter[str] = Counter()

    def weigh(model: HybridLM) -> None:
        contract = {p for _, p in contract_parameters(model)}
        for name, p in model.named_parameters():
            if p not in contract:
                sizes[part_of(name)] += local_part(p).numel()

    def cells() -> int:
        planned_model(few, world, weigh)
        return sum(sizes[part] for part, _ in standing)

    return reshards(config, world, cells)


def reshards(config: Config, world: World, cells: Callable[[], int]) -> Reshard:
    """Resolve `mesh.reshard=auto` for a model whose units gather `cells` cells."""
    if config.mesh.reshard != "auto" or not world.parallel:
        return config.mesh.reshard
    from parallel.fsdp import RESHARD_ABOVE_BYTES

    itemsize = compute_dtype(config.precision, world.device).itemsize
    return "always" if cells() * itemsize > RESHARD_ABOVE_BYTES else "never"
