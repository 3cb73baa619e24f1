"""Simulate a step through the stages of a pipeline, on one of its ranks; no torch import here.

The actions are those of the schedule. Gathered parameters stay from the first forward to the end of
the step, gradients stay whole until then, every microbatch has its own masks, and torch up to 2.14
keeps a buffer for each microbatch of all that a stage receives from its neighbours.

A split backward frees nothing in its first walk, for gradients of inputs: what each product was
given stays, and the gradients that the second walk starts from come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from megacpp.config.schema import KEEP
from megacpp.memory.forms.batch import mask_bytes
from megacpp.memory.forms.layers import WALKS_APART
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
APART = TORCH >= WALKS_APART


def pipeline_step(
    step: StepSimulation, stages: Sequence[Sequence[Layer]], root: Unit, own: LocalShapes
) -> None:
    """Simulate the actions of the rank's schedule in their order, then the reductions.

    Args:
        step: simulation that records the moments.
        stages: parts of each stage of the rank, in order.
        root: unit of the parameters that stay in fp32.
        own: sizes of the rank.
    """
    step.policy = replace(step.policy, again=False)
    if step.policy.sharded:
        step.gathered += root.gathered * step.policy.store
    for stage in stages:
        for layer in stage:
            step.gather(layer.units.block)
            step.gather(layer.units.experts)
    step.flat = 0
    kinds = [{layer.kind for layer in stage} for stage in stages]
    running = max(mask_bytes(own, few) for few in kinds)
    # A graph that would run pieces again still holds the documents of the microbatch before.
    running *= 1 if own.config.recompute == KEEP else 2
    batch = step.base["batch"] - mask_bytes(own, set().union(*kinds)) + running
    step.rest({**step.base, "batch": batch})
    masks = [mask_bytes(own, few, saved=True) for few in kinds]
    state = PipelineState(step, stages, masks)
    seen = set[tuple[int, str, tuple[StageState, ...]]]()
    for place, kind in rank_actions(own):
        moment = place, kind, tuple(state.now)
        if moment not in seen:
            seen.add(moment)
            state.run(place, kind)
        state.after(place, kind)
    state.reduce(root)


@dataclass(frozen=True, slots=True)
class StageState:
    """Microbatches and gradients that a stage holds between two actions.

    Attributes:
        alive: microbatches of which a backward is still to come.
        halves: those of them whose gradients of weights alone are to come.
        wide: its gradients of earlier microbatches are summed in the dtype of the reduction.
        narrow: the last walk for weights left its gradients in the dtype of the computation.
    """

    alive: int = 0
    halves: int = 0
    wide: bool = False
    narrow: bool = False


class PipelineState:
    """State of a rank's stages, and the simulation of one action after another.

    Args:
        step: simulation that records the moments; its state is the one before the first action.
        stages: parts of each stage of the rank, in order.
        masks: bytes of a microbatch's masks in each stage.
    """

    def __init__(
        self, step: StepSimulation, stages: Sequence[Sequence[Layer]], masks: Sequence[int]
    ) -> None:
        self.step, self.stages, self.masks = step, stages, masks
        self.now = [StageState() for _ in stages]
        self.base, self.gathered = step.base, step.gathered

    def run(self, place: int, kind: str) -> None:
        """Simulate an action of a stage: `F`, `B`, `I` or `W` (megacpp/speed/pipeline.py)."""
        step, stage, state = self.step, self.stages[place], self.now[place]
        self._set(place, kind)
        if kind == "F":
            for layer in stage:
                step.forward(layer, gathers=False)
        elif kind == "B":
            for layer in reversed(stage):
                step.backward(layer, False, 0, state.wide, False, True)
        elif kind == "I":
            for layer in reversed(stage):
                step.backward_inputs(layer, state.wide, state.narrow)
        else:  # in the order of the parameters
            for layer in stage:
                step.backward_weights(layer, state.narrow)

    def after(self, place: int, kind: str) -> None:
        """Count an action as done."""
        alive, halves, wide, narrow = astuple(self.now[place])
        if kind == "F":
            found = StageState(alive + 1, halves, wide, narrow)
        elif kind == "B":
            found = StageState(alive - 1, halves, True, False)
        elif kind == "I":
            found = StageState(alive, halves + 1, wide or narrow, False)
        else:
            found = StageState(alive - 1, halves - 1, wide, True)
        self.now[place] = found

    def reduce(self, root: Unit) -> None:
        """Simulate the reductions of all gradients at the end of the step."""
        step, name = self.step, "reductions"
        self._set(0, "")
        step.see(name)
        for stage, state in zip(self.stages, self.now, strict=True):
            step.whole += self._gradients(stage, replace(state, wide=True, narrow=False))
            step.whole -= self._gradients(stage, state)
            for layer in stage:
                for unit in (layer.units.experts, layer.units.block):
                    if unit.whole:
                        step.finish(name, unit, 0, True, True, True)
        step.scatter = root.gathered * step.policy.store
        step.see(name)
        step.whole = 0
        step.shards += root.own * step.policy.store
        step.scatter = step.gathered = step.flat = 0

    def _set(self, place: int, kind: str) -> None:
        """Set the simulation to the state before an action."""
        step = self.step
        step.kept, step.away, step.whole, step.passed = (0, 0, 0), 0, 0, 0
        step.gathered = self.gathered
        waits = [state.alive for state in self.now]
        waits[place] = max(0, waits[place] - (kind != "F"))  # without the one that runs
        masks = sum(n * size for n, size in zip(waits, self.masks, strict=True))
        step.rest({**self.base, "batch": self.base["batch"] + masks})
        for at, (stage, state) in enumerate(zip(self.stages, self.now, strict=True)):
            step.whole += self._gradients(stage, state)
            once = state.alive > 0 and not (at == place and kind == "F")
            for layer in stage:
                step.keep(layer, state.alive)
                step.keep_halves(layer, state.halves)
                step.gathered -= (state.alive - once) * layer.copies
            # The gradient of its input waits with the graph.
            a, b, c = step.kept
            step.kept = a + state.halves * stage[0].stream, b, c

    def _gradients(self, stage: Sequence[Layer], state: StageState) -> int:
        """Return bytes of a stage's whole gradients."""
        units = [layer.units for layer in stage]
        moved = sum(x.experts.moved + x.block.moved for x in units)
        wide = sum(x.wide.whole for x in units) * self.step.policy.store
        summed = state.wide * moved * self.step.policy.store
        first = (state.wide or state.narrow) * wide
        return summed + first + state.narrow * moved * self.step.policy.compute


def microbatches(own: LocalShapes) -> int:
    """Return the number of microbatches of a step that each stage of a rank runs."""
    mesh, total = own.config.mesh, own.config.train.grad_accum
    return max(1, microbatches_through(mesh.pp_schedule, total))


def rank_actions(own: LocalShapes) -> list[tuple[int, str]]:
    """Return the actions of a rank in order: number of its stage, and kind.

    The gradients of the first stage have no input to begin with: torch makes all of them when
    those of its weights are due.
    """
    from megacpp.cli.schedule import pipeline_actions

    mesh, model = own.config.mesh, own.config.model
    parts = stage_parts(model, mesh, own.stage)
    places = {part.index: place for place, part in enumerate(parts)}
    both = mesh.pp_schedule in BOTH_WAYS
    rank = min(own.stage, mesh.pp - 1 - own.stage) if both else own.stage
    found: list[tuple[int, str]] = []
    for action in pipeline_actions(own.config)[rank]:
        part, kind = parts[places[action.stage]], action.kind
        if kind in "IW" and (not APART or part.first):
            waits = APART and not part.back
            kind = "B" if (kind == "W") == waits else ""
        if kind:
            found.append((places[action.stage], kind))
    return found


def in_flight(own: LocalShapes) -> list[int]:
    """Return, for each stage of a rank, the most microbatches whose forward it keeps at once."""
    found = [0] * stages_per_rank(own.config.mesh.pp_schedule)
    alive = list(found)
    for place, kind in rank_actions(own):
        alive[place] += {"F": 1, "I": 0}.get(kind, -1)
        found[place] = max(found[place], alive[place])
    return found


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
    bottom = mesh.pp_schedule in V_SHAPED and own.stage == mesh.pp - 1  # its stages are neighbours
    found = 0
    for place, part in enumerate(parts):
        # And the gradient of the input before, on its way.
        found += (not part.first and not (bottom and place == 1)) * (inputs + 1)
        found += (not part.last and not (bottom and place == 0)) * gradients
    return found * one
