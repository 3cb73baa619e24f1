"""Simulate a step through the stages of a pipeline, on one of its ranks; no torch import here.

Gathered parameters stay from the first forward to the end of the step, gradients stay whole until
then, every microbatch has its own masks, and torch up to 2.14 keeps a buffer for each microbatch of
all that a stage receives from its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megacpp.config.schema import KEEP
from megacpp.memory.forms.batch import mask_bytes
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.simulation import Layer, StepSimulation
from megacpp.memory.forms.units import TORCH, Unit
from megacpp.model.stages import (
    BOTH_WAYS,
    V_SHAPED,
    microbatches_through,
    stage_parts,
    stages_per_rank,
)

# torch 2.15 and later allocates a buffer when it starts to receive into it, and frees it after use.
BUFFERS_ON_RECEIPT = TORCH >= (2, 15)


def pipeline_step(
    step: StepSimulation, stages: Sequence[Sequence[Layer]], root: Unit, own: LocalShapes
) -> None:
    """Simulate the forwards in flight and one backward, then the reductions.

    Args:
        step: simulation that records the moments.
        stages: parts of each stage of the rank, in order.
        root: unit of the parameters that stay in fp32.
        own: sizes of the rank.
    """
    total = microbatches(own)
    flight = in_flight(own)
    step.policy = replace(step.policy, again=False)
    if step.policy.sharded:
        step.gathered += root.gathered * step.policy.store
    for stage in stages:
        for layer in stage:
            step.gather(layer.units.block)
            step.gather(layer.units.experts)
    step.flat = 0
    moved = sum(x.units.experts.moved + x.units.block.moved for stage in stages for x in stage)
    summed = (root.whole + moved) * step.policy.store
    kinds = {layer.kind for stage in stages for layer in stage}
    mask = mask_bytes(own, kinds, saved=True)
    if own.config.recompute != KEEP:
        # A graph that would run pieces again still holds the documents of the microbatch before.
        step.rest({**step.base, "batch": step.base["batch"] + mask_bytes(own, kinds)})
    for carried in (False, True) if total > 1 else (False,):
        alive = [min(n, total - 1) if carried else n for n in flight]
        step.whole = summed if carried else 0
        _round(step, stages, alive, mask, carried)
    step.whole = summed
    _reductions(step, stages, root, total > 1)


def _round(
    step: StepSimulation,
    stages: Sequence[Sequence[Layer]],
    alive: Sequence[int],
    mask: int,
    carried: bool,
) -> None:
    """Simulate the last forward before a backward, and that backward; `alive`: per stage."""
    base = step.base
    step.rest({**base, "batch": base["batch"] + mask * (max(1, sum(alive)) - 1)})
    for stage, number in zip(stages, alive, strict=True):
        for layer in stage:
            step.keep(layer, number)
            step.gathered -= (number - 1) * layer.copies if number else 0
    last = stages[-1]
    for layer in last:
        step.keep(layer, -1)
    for layer in last:
        step.forward(layer, gathers=False)
    for layer in reversed(last):
        step.backward(layer, False, 0, carried, False, True)
    for layer in last:
        step.keep(layer)
    for stage, number in zip(stages, alive, strict=True):
        for layer in stage:
            step.keep(layer, -number)
            step.gathered += (number - 1) * layer.copies if number else 0
    step.rest(base)


def _reductions(
    step: StepSimulation, stages: Sequence[Sequence[Layer]], root: Unit, carried: bool
) -> None:
    """Simulate the reductions of all gradients at the end of the step."""
    name = "reductions"
    for stage in stages:
        for layer in stage:
            for unit in (layer.units.experts, layer.units.block):
                if unit.whole:
                    step.finish(name, unit, 0, True, True, True)
    step.scatter = root.gathered * step.policy.store
    step.see(name)
    step.whole = 0
    step.shards += root.own * step.policy.store
    step.scatter = step.gathered = step.flat = 0


def microbatches(own: LocalShapes) -> int:
    """Return the number of microbatches of a step that each stage of a rank runs."""
    mesh, total = own.config.mesh, own.config.train.grad_accum
    return max(1, microbatches_through(mesh.pp_schedule, total))


def in_flight(own: LocalShapes) -> list[int]:
    """Return, for each stage of a rank, the most microbatches whose forward it keeps at once."""
    mesh, total = own.config.mesh, microbatches(own)
    if mesh.pp_schedule in ("gpipe", "looped_bfs"):
        return [total] * stages_per_rank(mesh.pp_schedule)
    if mesh.pp_schedule == "1f1b":
        return [min(total, mesh.pp - own.stage)]
    if mesh.pp_schedule == "interleaved_zb":  # until gradients of weights are made, later
        return [min(total, mesh.pp)] * 2
    if mesh.pp_schedule in BOTH_WAYS:  # a V on half as many ranks
        half, end = mesh.pp // 2, min(own.stage, mesh.pp - 1 - own.stage)
        found = [min(total, 2 * half - end), min(total, half + end)]
        return found if own.stage < half else found[::-1]
    if mesh.pp_schedule in V_SHAPED:
        return [min(total, 2 * mesh.pp - own.stage), min(total, mesh.pp + own.stage)]
    chunks = stages_per_rank(mesh.pp_schedule)
    ahead = (mesh.pp - own.stage - 1) * 2 + (chunks - 1) * mesh.pp + 1
    found = [0] * chunks
    for number in range(min(ahead, total * chunks)):
        found[number // mesh.pp % chunks] += 1
    return [min(total, n) for n in found]


def buffer_bytes(own: LocalShapes) -> int:
    """Return bytes that a rank's stages receive: inputs from the left, gradients from the right."""
    if own.config.mesh.pp == 1:
        return 0
    config, mesh = own.config, own.config.mesh
    one = own.stream * config.model.mhc.streams * config.model.dim * own.compute
    parts = stage_parts(config.model, mesh, own.stage)
    inputs = gradients = microbatches(own)
    if BUFFERS_ON_RECEIPT and mesh.pp_schedule in ("gpipe", "1f1b"):
        gradients = 1
    found = 0
    for part in parts:
        # And the gradient of the input before, on its way.
        found += (not part.first) * (inputs + 1) + (not part.last) * gradients
    return found * one
