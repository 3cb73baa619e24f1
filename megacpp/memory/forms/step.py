"""Moments of one optimizer step of a rank, composed from its layers; no torch import here.

    resting    parameters, optimizer state, ids and tensors made from documents
    forward    of every layer: saved activations of earlier layers, its working set, gathered
               parameters
    backward   of every layer, with the gradients made by then
    clip, optimizer

Of many microbatches the first, one in the middle and the last are simulated: these start with the
whole gradients, or shards, of earlier ones, and the last one reduces them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.config.schema import Config
from megacpp.memory.forms.batch import ids_bytes, mask_bytes
from megacpp.memory.forms.layers import layers_of, root_unit
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parameters import Storage, kinds_of
from megacpp.memory.forms.parts import OUTER
from megacpp.memory.forms.pipeline import buffer_bytes, pipeline_step
from megacpp.memory.forms.simulation import (
    FsdpPolicy,
    Layer,
    StepSimulation,
    flat_ahead,
    waiting,
)
from megacpp.memory.forms.units import Unit, stored_of

RESHARD_ABOVE_BYTES = 1 << 30  # of gathered parameters: parallel/fsdp.py


@dataclass(frozen=True)
class StepBytes:
    """Result of `step_bytes`.

    Attributes:
        components: bytes at the fullest moment; they sum to `most`.
        moment: name of the fullest moment.
        moments: most bytes of each moment.
        most: bytes at the fullest moment.
        resting: bytes between two steps.
        beside: bytes in pools of other streams when the main stream's are fullest: reduced
            gradients, and units as they arrive (megacpp/memory/allocator.py).
        optimizer: bytes in the optimizer's step, without its temporaries.
        one_layer: most bytes that a layer has alive while it runs.
    """

    components: dict[str, int]
    moment: str
    moments: dict[str, int]
    most: int
    resting: int
    beside: int
    optimizer: int
    one_layer: int


def step_bytes(config: Config, size: int, rank: int, most: bool = False) -> StepBytes:
    """Return the fullest moment of a step of one rank.

    Args:
        config: resolved for `size` ranks.
        size: number of ranks.
        rank: whose step is simulated.
        most: dropless routers send as many rows to this rank as they can.
    """
    own, stored = LocalShapes.on_rank(config, size, rank, most), stored_of(config, size, rank)
    stages = layers_of(own, kinds_of(config, size, rank), stored.units, size > 1)
    base = {
        "parameters": stored.parameters,
        "optimizer_state": stored.state,
        "batch": ids_bytes(own),
        "communication": buffer_bytes(own),
    }
    step = StepSimulation(base, policy_of(config, own, stages, size > 1))
    step.see("between steps")
    resting = step.most
    kinds = {layer.kind for layers in stages for layer in layers}
    step.rest({**base, "batch": base["batch"] + mask_bytes(own, kinds)})
    root = root_unit(stages)
    if config.mesh.pp > 1:
        pipeline_step(step, stages, root, own)
    else:
        microbatches(step, stages[0], root, config)
    step.gathered = step.flat = step.scatter = 0
    step.rest(base)
    step.see("gradients of tp", communication=stored.partial)
    step.see("clip")
    step.see("optimizer step", stored.transient[0], other="muon_transient")
    optimizer = step.moments["clip"]
    beside = beside_bytes(stages, step) if size > 1 else 0
    found = step.components, step.moment, step.moments, step.most, resting
    one_layer = max(fullest_bytes(layer) for layers in stages for layer in layers)
    return StepBytes(*found, beside, optimizer, one_layer)


def fullest_bytes(layer: Layer) -> int:
    """Return the bytes of a layer's fullest moment, its saved activations included.

    Without these, a policy that saves less would have a larger bound.
    """
    return max((moment.tensors for moment in (*layer.forward, *layer.backward)), default=0)


def beside_bytes(stages: list[list[Layer]], step: StepSimulation) -> int:
    """Return bytes of gradient shards and arriving units, less those counted at the peak.

    Arriving units are two of the largest, and one of a block.
    """
    blocks = [layer for layers in stages for layer in layers if layer.kind not in OUTER]
    ends = [layer for layers in stages for layer in layers if layer.kind in OUTER]
    block = max((max(x.units.block.flat, x.units.experts.flat) for x in blocks), default=0)
    largest = max([block, *(x.units.block.flat for x in ends)])
    arriving = (2 * largest + block) * step.policy.compute
    return max(0, step.shards + arriving - step.elsewhere)


def microbatches(step: StepSimulation, layers: list[Layer], root: Unit, config: Config) -> None:
    """Simulate the microbatches that differ: the first, a middle one, if any, and the last.

    Args:
        step: simulation that records the moments.
        layers: parts of the rank, in order.
        root: unit of the parameters that stay in fp32.
        config: resolved.
    """
    total, sync = max(1, config.train.grad_accum), config.train.gradient_sync
    sync = sync if step.policy.sharded else "defer"
    if step.policy.sharded:
        step.gathered += root.gathered * step.policy.store
    for number in sorted({0, min(1, total - 1), total - 1}):
        microbatch(step, layers, root, number, total, sync)


def microbatch(
    step: StepSimulation, layers: list[Layer], root: Unit, number: int, total: int, sync: str
) -> None:
    """Simulate forward and backward of one microbatch, without a pipeline.

    Args:
        step: simulation that records the moments.
        layers: parts of the rank, in order.
        root: unit of the parameters that stay in fp32.
        number: of the microbatch, from 0.
        total: microbatches of the step.
        sync: `train.gradient_sync`.
    """
    first, last = number == 0, number == total - 1
    carried, reduces = not first and sync != "each", last or sync == "each"
    stays, renewed = sync == "resident" and not last, sync == "each" and not first
    narrow, again = step.policy.compute, step.policy.again
    sharded = step.policy.sharded
    gathers = first or sync != "resident"
    for layer in layers:
        step.forward(layer, gathers, looks=last or sync == "each")
    step.gathered -= sum(layer.copies[1] for layer in layers)  # autocast ends
    step.flat = 0
    for place in reversed(range(len(layers))):
        layer = layers[place]
        ahead = flat_ahead(layers[:place]) * narrow * again
        gathered_anew = again and sharded and (layer.kind not in OUTER or layer.kind == "mtp")
        step.backward(layer, gathered_anew, ahead, carried, reduces, stays, renewed)
    if not sharded:
        step.whole -= waiting(layers)
        step.finish("end of backward", layers[0].units.block, 0, carried, reduces, leaves=False)
        return
    end_of_backward(step, layers, root, carried, reduces, stays, renewed)
    if last:
        step.scatter = 0
        step.gathered -= root.gathered * step.policy.store


def end_of_backward(
    step: StepSimulation,
    layers: list[Layer],
    root: Unit,
    carried: bool,
    reduces: bool,
    stays: bool,
    renewed: bool,
) -> None:
    """Simulate the reductions of the root unit, then of embeddings and n-gram tables.

    Their inputs have no gradient that would tell FSDP2 earlier that their backward is done.

    Args:
        step: simulation that records the moments.
        layers: parts of the rank, in order.
        root: unit of the parameters that stay in fp32.
        carried: earlier microbatches left whole gradients.
        reduces: this microbatch reduces them.
        stays: parameters stay whole for the next microbatch.
        renewed: gradients have been reduced before.
    """
    name, store = "end of backward", step.policy.store
    if reduces and root.whole:
        step.scatter = root.gathered * store
        wide = 0 if renewed else root.whole * store
        step.see(name)
        step.whole -= wide
        step.see(name, 0, root.own * store)
        step.shards += 0 if renewed else root.own * store
    before = waiting(layers)
    for layer in (x for x in layers if x.late and x.units.block.whole):
        there = not step.policy.again or layer.tied or layer.kind == "mtp"
        step.whole -= before if layer.kind == "embed" else layer.waits
        step.finish(name, layer.units.block, 0, carried, reduces, stays, there, renewed)


def policy_of(
    config: Config, own: LocalShapes, stages: list[list[Layer]], sharded: bool
) -> FsdpPolicy:
    """Return how FSDP2 is used in a step; units are gathered twice if one stage is large.

    Args:
        config: resolved.
        own: sizes of the rank.
        stages: parts of each stage of the rank.
        sharded: FSDP2 shards the model.
    """
    reshard = "never" if config.train.gradient_sync == "resident" else config.mesh.reshard
    whole = max(
        sum(layer.units.block.whole + layer.units.experts.whole for layer in layers)
        for layers in stages
    )
    large = whole * own.compute > RESHARD_ABOVE_BYTES
    again = reshard == "always" or (reshard == "auto" and large)
    return FsdpPolicy(sharded, sharded and again, own.compute, Storage.in_run(config).store)
