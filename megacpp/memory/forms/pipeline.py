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
from megacpp.memory.forms.layers import WALKS_APART, without_output
from megacpp.memory.forms.local_shapes import LocalShapes
from megacpp.memory.forms.parts import OUTER
from megacpp.memory.forms.peak_point import PeakPoint
from megacpp.memory.forms.simulation import (
    NEVER_AGAIN,
    Layer,
    StepSimulation,
    flat_ahead,
    waiting,
)
from megacpp.memory.forms.units import TORCH, Unit
from megacpp.model.stage_actions import answered
from megacpp.model.stages import (
    BOTH_WAYS,
    SPLIT_BACKWARD,
    V_SHAPED,
    microbatches_through,
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
    split = own.config.mesh.pp_schedule in SPLIT_BACKWARD  # parallel/pipeline.py keeps units whole
    step.policy = replace(step.policy, again=step.policy.again and not split)
    if step.policy.sharded:
        step.gathered += root.gathered * step.policy.store
    kinds = [{layer.kind for layer in stage} for stage in stages]
    batch = step.base["batch"] - mask_bytes(own, set().union(*kinds))
    step.rest({**step.base, "batch": batch})
    if at_bottom(own):  # its first stage's results are what its second has received
        (*before, last), second = stages
        walks = _more(last.inputs, -last.stream), _more(last.weights, -last.stream)
        last = replace(without_output(last, last.stream), inputs=walks[0], weights=walks[1])
        stages = [[*before, last], second]
    stages = [_without_messages(stage) for stage in stages]
    state = PipelineState(step, stages, own)
    moments: dict[tuple[int, str, tuple[StageState, ...]], list[int]] = {}
    for place, kind in rank_actions(own):
        state.before(place, kind)
        moment = place, kind, tuple(state.now)
        moments[moment] = max(moments.get(moment, []), [*state.sent], key=sum)
        state.after(place, kind)
    end = state.now, state.sent
    for (place, kind, now), sent in moments.items():
        state.now, state.sent = list(now), sent
        state.run(place, kind)
    state.now, state.sent = end
    state.reduce_root(root)


def _without_messages(stage: Sequence[Layer]) -> list[Layer]:
    """Return a stage whose two walks count no gradients of its input and its result.

    They are counted as what the rank sends, receives or hands on.
    """
    found = [*stage]
    if (last := found[-1]).inputs:
        found[-1] = replace(last, inputs=_more(last.inputs, -last.stream))
    if (first := found[0]).weights:
        weights, between = _more(first.weights, -first.stream), first.between - first.stream
        found[0] = replace(first, weights=weights, between=between)
    return found


def _more(points: Sequence[PeakPoint], size: int) -> tuple[PeakPoint, ...]:
    """Return moments at which `size` more bytes are alive."""
    return tuple(point.more(size) for point in points)


@dataclass(frozen=True, slots=True)
class StageState:
    """Microbatches, gradients and weights that a stage holds between two actions.

    Attributes:
        alive: microbatches of which a backward is still to come.
        halves: those of them whose gradients of weights alone are to come.
        wide: its gradients of earlier microbatches are summed in the dtype of the reduction.
        narrow: the last walk for weights left its gradients in the dtype of the computation.
        whole: its weights are gathered.
        reduced: its gradients are reduced, and its weights are shards again.
        lent: another stage of the rank left gradients of its embedding, as `wide`.
    """

    alive: int = 0
    halves: int = 0
    wide: bool = False
    narrow: bool = False
    whole: bool = True
    reduced: bool = False
    lent: bool = False


class PipelineState:
    """State of a rank's stages, and the simulation of one action after another.

    Args:
        step: simulation that records the moments; its state is the one before the first action.
        stages: parts of each stage of the rank, in order.
        own: sizes of the rank.

    Attributes:
        now: state of each stage.
        sent: number of gradients of its input that each stage still holds.
        forwards: number of forwards that each stage has run.
        late: units whose gradients each stage adds up when its backward has ended, and the stage
            that holds them: a last stage may use the embedding of the first.
    """

    def __init__(
        self, step: StepSimulation, stages: Sequence[Sequence[Layer]], own: LocalShapes
    ) -> None:
        self.step, self.stages = step, stages
        kinds = [{layer.kind for layer in stage} for stage in stages]
        self.masks = [mask_bytes(own, few, saved=True) for few in kinds]
        self.running = [mask_bytes(own, few) for few in kinds]
        # A graph that would run pieces again still holds the documents of the microbatch before.
        self.others = 0 if own.config.recompute == KEEP else max(self.running)
        self.base, self.gathered = step.base, step.gathered
        looped = len(stages) > 1  # then torch gathers all before the first forward
        self.now = [StageState(whole=looped or not step.policy.again) for _ in stages]
        self.sent, self.forwards = [0] * len(stages), [0] * len(stages)
        self.answered = answered_gradients(own)
        self.stream = own.stream_bytes
        self.late = [
            [(n, x.units.block) for x in stage if x.late and x.units.block.whole]
            for n, stage in enumerate(stages)
        ]
        for late, other, stage in zip(self.late, reversed(self.late), stages, strict=True):
            if waiting(stage) and not any(x.late and x.kind != "mtp" for x in stage):
                late += other[:1]
        parts = own.stage_parts
        received = [at_bottom(own) and place == 0 for place in range(len(parts))]
        self.returned = [
            self.stream * (not part.last and not counted)
            for part, counted in zip(parts, received, strict=True)
        ]

    def run(self, place: int, kind: str) -> None:
        """Simulate an action of a stage: `F`, `B`, `I` or `W` (model/stage_actions.py), or `R`.

        `R` reduces its gradients.
        """
        step, stage, state = self.step, self.stages[place], self.now[place]
        self._set(place, kind)
        if kind == "F":
            for layer in stage:
                step.forward(layer, gathers=not self._held(layer, state))
        elif kind == "B":
            late = self.late[place]
            carried = [self.now[n].wide or self.now[n].lent for n, _ in late]
            waits = not (step.policy.at_once and all(carried))
            for at, layer in reversed([*enumerate(stage)]):
                layer = layer if waits else replace(layer, waits=0)
                gathers = layer.kind not in NEVER_AGAIN and not self._held(layer, state)
                ahead = flat_ahead(stage[:at]) * step.policy.compute * (not state.whole)
                step.backward(layer, gathers, ahead, state.wide, False, True)
                if at + 1 == len(stage):  # torch holds what the stage returned until the end
                    a, b, c = step.kept
                    step.kept = a + self.returned[place], b, c
            step.whole -= sum(layer.waits for layer in stage) * waits
            for (_, unit), summed in zip(late, carried, strict=True):
                step.finish(f"backward of {stage[0].name}", unit, 0, summed, False, leaves=False)
        elif kind == "I":
            for layer in reversed(stage):
                step.backward_inputs(layer, state.wide, state.narrow)
        elif kind == "W":  # in the order of the parameters
            for layer in stage:
                step.backward_weights(layer, state.narrow or (step.policy.at_once and state.wide))
        else:
            self._reduce(stage, state)

    def before(self, place: int, kind: str) -> None:
        """Let go of the gradients that an action's input shows to have arrived."""
        if kind == "F":
            self.sent[place] -= (self.answered[place] or {}).get(self.forwards[place], 0)
            self.forwards[place] += 1

    def after(self, place: int, kind: str) -> None:
        """Count an action as done."""
        alive, halves, wide, narrow, *_, lent = astuple(self.now[place])
        if kind == "F":
            found = StageState(
                alive + 1, halves, wide, narrow, not self.step.policy.again, lent=lent
            )
        elif kind == "B":
            found = StageState(alive - 1, halves, True, False)
        elif kind == "I":
            found = StageState(alive, halves + 1, wide or narrow, False)
        elif kind == "W":
            at_once = self.step.policy.at_once
            found = StageState(alive - 1, halves - 1, wide or at_once, not at_once)
        else:
            found = StageState(reduced=True)
        self.now[place] = found
        for n, _ in self.late[place] if kind == "B" else ():
            self.now[n] = replace(self.now[n], lent=True)
        if kind in "BI" and (answered := self.answered[place]) is not None:
            self.sent[place] = self.sent[place] + 1 if answered else 1

    def reduce_root(self, root: Unit) -> None:
        """Simulate the reduction of the parameters that stay in fp32, at the end of the step."""
        step, name = self.step, "reductions"
        self._set(0, "")
        step.scatter = root.gathered * step.policy.store
        step.see(name)
        step.whole = 0
        step.shards += root.own * step.policy.store
        step.scatter = step.gathered = 0

    def _reduce(self, stage: Sequence[Layer], state: StageState) -> None:
        """Simulate the reductions of a stage behind its last backward."""
        step, name = self.step, "reductions"
        step.see(name)
        step.whole += self._gradients(stage, replace(state, wide=True, narrow=False))
        step.whole -= self._gradients(stage, state)
        for layer in sorted(stage, key=lambda layer: layer.kind not in OUTER):  # as Stage has them
            for unit in (layer.units.block, layer.units.experts):
                if unit.whole:
                    held = step.policy.sharded and self._held(layer, state)
                    step.gathered -= held * unit.gathered * step.policy.compute
                    step.reduce(name, unit, 0, True)
        step.scatter = 0

    def _set(self, place: int, kind: str) -> None:
        """Set the simulation to the state before an action."""
        step, size, store = self.step, self.step.policy.compute, self.step.policy.store
        step.kept, step.away, step.whole, step.shards = (0, 0, 0), 0, 0, 0
        step.gathered, step.flat, step.passed = self.gathered, 0, 0
        waits = [state.alive for state in self.now]
        waits[place] = max(0, waits[place] - (kind != "F"))  # without the one that runs
        masks = sum(n * size for n, size in zip(waits, self.masks, strict=True))
        moved = self.base["communication"] + sum(self.sent) * self.stream
        batch = self.base["batch"] + self.running[place] + self.others + masks
        step.rest({**self.base, "batch": batch, "communication": moved})
        for stage, state in zip(self.stages, self.now, strict=True):
            step.whole += self._gradients(stage, state)
            for layer in stage:
                step.keep(layer, state.alive)
                step.keep_halves(layer, state.halves)
                block, experts = layer.units.block, layer.units.experts
                if step.policy.sharded and self._held(layer, state):
                    step.gathered += (block.gathered + experts.gathered) * size
                step.shards += state.reduced * (block.reduced + experts.reduced) * store

    def _held(self, layer: Layer, state: StageState) -> bool:
        """Return whether a part's weights are gathered between two actions."""
        if not self.step.policy.again or layer.kind == "head":
            return not state.reduced
        return state.whole and not state.reduced and layer.kind not in NEVER_AGAIN

    def _gradients(self, stage: Sequence[Layer], state: StageState) -> int:
        """Return bytes of a stage's whole gradients."""
        units = [layer.units for layer in stage]
        moved = sum(x.experts.moved + x.block.moved for x in units)
        wide = sum(x.wide.whole for x in units) * self.step.policy.store
        summed = state.wide * moved * self.step.policy.store
        first = (state.wide or state.narrow or state.reduced) * wide
        if state.lent and not state.wide:
            moved = sum(layer.units.block.moved for layer in stage if layer.kind == "embed")
            summed = moved * self.step.policy.store
        return summed + first + state.narrow * moved * self.step.policy.compute


def microbatches(own: LocalShapes) -> int:
    """Return the number of microbatches of a step that each stage of a rank runs."""
    mesh, total = own.config.mesh, own.config.train.grad_accum
    return max(1, microbatches_through(mesh.pp_schedule, total))


def rank_actions(own: LocalShapes) -> list[tuple[int, str]]:
    """Return the actions of a rank in order: number of its stage, and kind; the last reduces.

    The gradients of the first stage have no input to begin with: torch makes all of them when
    those of its weights are due.
    """
    from megacpp.cli.schedule import pipeline_actions

    mesh, parts = own.config.mesh, own.stage_parts
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
    last = {place: number for number, (place, _) in enumerate(found)}
    for place, number in sorted(last.items(), key=lambda item: -item[1]):
        found.insert(number + 1, (place, "R"))
    return found


def in_flight(own: LocalShapes) -> list[int]:
    """Return, for each stage of a rank, the most microbatches whose forward it keeps at once."""
    found = [0] * stages_per_rank(own.config.mesh.pp_schedule)
    alive = list(found)
    for place, kind in rank_actions(own):
        alive[place] += {"F": 1, "I": 0, "R": 0}.get(kind, -1)
        found[place] = max(found[place], alive[place])
    return found


def buffer_bytes(own: LocalShapes) -> int:
    """Return bytes that a rank's stages receive: inputs from the left, gradients from the right."""
    if own.config.mesh.pp == 1:
        return 0
    inputs = gradients = microbatches(own)
    if BUFFERS_ON_RECEIPT and own.config.mesh.pp_schedule in ("gpipe", "1f1b"):
        gradients = 1
    found = sum((not p.first) * inputs + (not p.last) * gradients for p in own.stage_parts)
    return found * own.stream_bytes


def answered_gradients(own: LocalShapes) -> list[dict[int, int] | None]:
    """Return, for each stage of a rank, how many sent gradients each forward's input answers.

    None where none are sent. Those without an answer stay until the step has ended, or, where none
    has one, until the next is sent (parallel/sends.py).
    """
    from megacpp.cli.schedule import pipeline_actions

    parts, actions = own.stage_parts, pipeline_actions(own.config)
    looped = len(parts) > 1
    found = [answered(actions, part.index) if looped else {} for part in parts]
    return [
        None if part.first or (place and at_bottom(own)) else {m: len(few) for m, few in of.items()}
        for place, (part, of) in enumerate(zip(parts, found, strict=True))
    ]


def at_bottom(own: LocalShapes) -> bool:
    """Return whether a rank's stages are neighbours: one receives what the other has made."""
    mesh = own.config.mesh
    return mesh.pp_schedule in V_SHAPED and own.stage == mesh.pp - 1
