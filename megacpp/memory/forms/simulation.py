"""Simulate a step moment by moment: bytes alive on one rank at each of them.

`StepSimulation` holds the bytes that change between moments (gathered units, whole gradients and
shards, saved activations) and records the fullest moment. It follows FSDP2 of torch 2.13, unit by
unit:

    forward   a unit arrives flat and is copied out; the flat copy lives until the next one is
              copied out; the experts of a block are gathered when the block begins
    backward  the flat copy is freed at once, and the unit to the left is gathered
    after it  gradients are added to those of earlier microbatches in fp32, or copied into the
              buffer of a reduce-scatter, which lives until the next unit's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megacpp.memory.forms.peak_point import PeakPoint
from megacpp.memory.forms.units import PartUnits, Unit
from megacpp.memory.forms.weights import COPY
from megacpp.model.pattern import ENTRANCE

WINDOW_BYTES = 256 << 20  # on their way to the host, or back (checkpointing/offload.py)
NEVER_AGAIN = (*ENTRANCE, COPY, "top")  # parts whose weights no backward gathers
AFTER_NORM = ("top", "mtp", "head")  # parts that are given the last norm's result
KEPT = ("activations", "moe_routing", "head_loss")  # components of what forwards keep


@dataclass(frozen=True, slots=True)
class Layer:
    """Part of the model on this rank.

    Attributes:
        name: for people: `layer 7 (E)`, `head`, ...
        kind: a letter, `embed`, `norm` or `head`.
        units: FSDP2 units of the part.
        forward, backward: fullest moments.
        kept: bytes saved for the backward, by KEPT.
        copies: bytes of copies of weights that are saved, and that only autocast remembers.
        stream: bytes of the residual stream's gradient.
        passes: bytes that the next part is given and doesn't save.
        waits: bytes of a tied head's gradient, until the embedding has its own; of n-gram tables,
            and multi-token prediction that the trunk learns nothing from, until the end.
        tied: an embedding whose unit is the head's too, and whole until the loss; or such a head,
            in a last stage that looks tokens up.
        late: its gradients are reduced only when the backward has ended: its input has none.
        away: bytes that wait on the host.
        inputs, weights: fullest moments of a backward's two walks, if it is split.
        between: bytes that the first of them leaves for the second, beside what is saved.
    """

    name: str
    kind: str
    units: PartUnits
    forward: tuple[PeakPoint, ...]
    backward: tuple[PeakPoint, ...]
    kept: tuple[int, int, int]
    copies: tuple[int, int]
    stream: int
    passes: int = 0
    waits: int = 0
    tied: bool = False
    late: bool = False
    away: int = 0
    inputs: tuple[PeakPoint, ...] = ()
    weights: tuple[PeakPoint, ...] = ()
    between: int = 0


@dataclass(frozen=True, slots=True)
class FsdpPolicy:
    """Use of FSDP2 in a step.

    Attributes:
        sharded: it is used at all; else one process computes under autocast.
        again: units are resharded after their forward.
        compute, store: bytes of an element in products, and in gradients that are summed.
    """

    sharded: bool
    again: bool
    compute: int
    store: int

    @property
    def at_once(self) -> bool:
        """Whether each gradient is added to those of earlier microbatches as soon as it is made."""
        return not self.sharded or self.compute == self.store


@dataclass
class StepSimulation:
    """Bytes alive now, and the fullest moment so far.

    Attributes:
        base: resting bytes by component: parameters, state, batch.
        policy: use of FSDP2.
        gathered: bytes of gathered parameters, and of copies and casts of weights.
        flat: bytes of units as they arrived.
        scatter: bytes of the last reduce-scatter's input.
        whole: bytes of gradients that wait to be reduced.
        shards: bytes of reduced gradients.
        passed: bytes of the running part's input, if it isn't saved.
        kept: saved bytes, by KEPT.
        away: saved bytes that wait on the host, but for some on their way.
        moments: most bytes of each name.
        moment: name of the fullest moment.
        most: bytes at the fullest moment.
        elsewhere: bytes at the fullest moment in pools of other streams.
        fullest: state at the fullest moment, from which `components` follow.
    """

    base: dict[str, int]
    policy: FsdpPolicy
    gathered: int = 0
    flat: int = 0
    scatter: int = 0
    whole: int = 0
    shards: int = 0
    passed: int = 0
    kept: tuple[int, int, int] = (0, 0, 0)
    away: int = 0
    moments: dict[str, int] = field(default_factory=dict)
    moment: str = ""
    most: int = -1
    elsewhere: int = 0
    fullest: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.resting = sum(self.base.values())

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component at the fullest moment."""
        base, kept, gradients, moved, tensors, other = self.fullest
        found = {**base, **dict(zip(KEPT, kept, strict=True)), "gradients": gradients}
        found["communication"] = base.get("communication", 0) + moved
        found[other] = found.get(other, 0) + tensors
        return {name: size for name, size in found.items() if size}

    def rest(self, base: dict[str, int]) -> None:
        """Replace the resting bytes."""
        self.base, self.resting = base, sum(base.values())

    def see(
        self,
        name: str,
        tensors: int = 0,
        gradients: int = 0,
        communication: int = 0,
        other: str = "workspace",
    ) -> None:
        """Record a moment with more bytes alive than the state holds.

        Args:
            name: of the moment.
            tensors: bytes of other tensors.
            gradients: bytes of other gradients.
            communication: bytes of other gathered parameters and buffers.
            other: component that `tensors` belong to.
        """
        moved = self.gathered + self.flat + self.scatter + communication
        gradients += self.whole + self.shards
        kept = self.kept[0] + min(self.away, WINDOW_BYTES), *self.kept[1:]
        total = self.resting + sum(kept) + moved + gradients + tensors
        if total > self.moments.get(name, -1):
            self.moments[name] = total
        if total > self.most:
            self.most, self.moment = total, name
            self.elsewhere = self.flat + self.shards
            self.fullest = self.base, kept, gradients, moved, tensors, other

    def keep(self, layer: Layer, times: int = 1) -> None:
        """Count a layer's saved tensors `times` more; -1: they are freed."""
        (a, b, c), (x, y, z) = self.kept, layer.kept
        self.kept = a + times * x, b + times * y, c + times * z
        self.gathered += times * layer.copies[0]
        self.away += times * layer.away

    def keep_halves(self, layer: Layer, times: int = 1) -> None:
        """Count `times` more what a layer's walk for inputs leaves beside its saved tensors."""
        a, b, c = self.kept
        self.kept = a + times * layer.between, b, c

    # ---- forward ------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> int:
        """Gather a unit and return its bytes."""
        size = self.policy.compute
        self.flat = unit.flat * size
        self.gathered += unit.gathered * size
        return unit.gathered * size

    def forward(self, layer: Layer, gathers: bool = True, looks: bool = True) -> None:
        """Simulate one layer's forward.

        Args:
            layer: the part that runs.
            gathers: its parameters are shards before.
            looks: its moments count; else they equal another microbatch's.
        """
        name, size = f"forward of {layer.name}", self.policy.compute
        block, experts = layer.units.block, layer.units.experts
        had = 0 if gathers else (block.gathered + experts.gathered) * size
        gathers = gathers and self.policy.sharded
        if gathers and block.whole:
            if looks:  # the one before is still there, as it arrived
                given = layer.stream * (layer.kind in AFTER_NORM)  # which it or a later one saves
                arriving = (block.flat + block.gathered) * size
                self.see(name, self.passed + given, communication=arriving)
            had += self.gather(block)
        if gathers and experts.whole:
            if looks:
                self.see(name, layer.stream, communication=experts.flat * size)
            had += self.gather(experts)
            if looks and experts.across:
                self.see(name, layer.stream, communication=experts.across * size)
        for m in layer.forward if looks else ():
            self.see(name, m.tensors + self.passed, m.gradients)
        self.passed = layer.passes
        self.keep(layer)
        self.gathered += layer.copies[1]
        if self.policy.again and layer.kind != "head" and not layer.tied:
            self.gathered -= had

    # ---- backward -----------------------------------------------------------------------------

    def backward(
        self,
        layer: Layer,
        gathers: bool,
        ahead: int,
        carried: bool,
        reduces: bool,
        stays: bool = False,
        again: bool = False,
    ) -> None:
        """Simulate one layer's backward and the reduction of its gradients.

        Args:
            layer: the part that runs.
            gathers: its parameters are shards before.
            ahead: bytes of the unit to the left, which is gathered at the same time.
            carried: earlier microbatches left whole gradients.
            reduces: this microbatch's backward reduces them.
            stays: its parameters stay whole for the next microbatch.
            again: its gradients have been reduced before.
        """
        name, size = f"backward of {layer.name}", self.policy.compute
        units = layer.units
        if gathers and units.experts.across:  # rows of experts are put together once more
            arriving = units.experts.flat + units.experts.gathered + units.experts.across
            moved = (units.block.gathered + arriving) * size
            self.see(name, layer.stream, 0, moved)
        self.keep(layer, -1)
        if gathers:
            self.gathered += units.block.gathered * size
            self.gathered += units.experts.gathered * size
        self.flat = ahead
        for m in layer.backward:
            new = m.added - m.tensors if carried and self.policy.at_once else m.gradients
            self.see(name, m.tensors, new)
        for unit in (units.experts, units.block):
            if unit.whole and not layer.late:
                there = layer.kind != "top" or not self.policy.again
                self.finish(name, unit, layer.stream, carried, reduces, stays, there, again)
        self.whole += layer.waits
        self.flat = ahead
        if not carried and not again:
            self.whole += units.wide.whole * self.policy.store

    def backward_inputs(self, layer: Layer, wide: bool, narrow: bool) -> None:
        """Simulate one layer's walk for the gradients of inputs, which frees nothing.

        Behind it FSDP2 adds the gradients that the last walk for weights left to earlier ones.

        Args:
            layer: the part that runs.
            wide: earlier microbatches left gradients in the dtype of the reduction.
            narrow: the last one left gradients in the dtype of the computation.
        """
        name, policy = f"backward of {layer.name}", self.policy
        self.keep(layer, -1)
        for m in layer.inputs:
            self.see(name, m.tensors)
        self.keep(layer)
        self.keep_halves(layer)
        for unit in (layer.units.experts, layer.units.block) if narrow else ():
            if not wide:
                self.whole += unit.moved * policy.store
                self.see(name, layer.stream)
            self.whole -= unit.moved * policy.compute

    def backward_weights(self, layer: Layer, carried: bool) -> None:
        """Simulate one layer's walk for the gradients of weights.

        Args:
            layer: the part that runs.
            carried: an earlier walk left gradients, to which these are added in place.
        """
        name = f"backward of {layer.name}"
        self.keep(layer, -1)
        self.keep_halves(layer, -1)
        for m in layer.weights:
            self.see(name, m.tensors, m.gradients)
        if not carried:
            moved = layer.units.experts.moved + layer.units.block.moved
            self.whole += moved * self.policy.compute

    def finish(
        self,
        name: str,
        unit: Unit,
        tensors: int,
        carried: bool,
        reduces: bool,
        stays: bool = False,
        leaves: bool = True,
        again: bool = False,
    ) -> None:
        """Add up a unit's new gradients, and reduce them if `reduces`.

        Args:
            name: of the moment.
            unit: whose gradients are complete.
            tensors: bytes of other tensors alive.
            carried: `whole` holds the gradients of earlier microbatches.
            reduces: reduce them now.
            stays: parameters remain gathered.
            leaves: parameters are gathered now.
            again: shards of earlier microbatches exist, to which the new ones are added.
        """
        narrow, store = self.policy.compute, self.policy.store
        new, summed = unit.moved * narrow + unit.upcast * (store - narrow), unit.moved * store
        if not self.policy.sharded:
            if not carried:
                self.whole += summed
            return
        if carried and not self.policy.at_once:
            self.see(name, tensors, new)
        if leaves and not stays:
            self.gathered -= unit.gathered * narrow
        if not reduces:
            if not carried and narrow < store:
                self.see(name, tensors, summed + unit.last * narrow)
            if not carried:
                self.whole += summed
            return
        self.reduce(name, unit, tensors, carried, again)

    def reduce(
        self, name: str, unit: Unit, tensors: int, carried: bool, again: bool = False
    ) -> None:
        """Reduce a unit's gradients.

        Args:
            name: of the moment.
            unit: whose gradients are complete.
            tensors: bytes of other tensors alive.
            carried: they are summed over microbatches, in `whole`.
            again: shards of earlier microbatches exist, to which the new ones are added.
        """
        narrow, store = self.policy.compute, self.policy.store
        own, sent = unit.reduced * store, unit.reduced * unit.shards * store
        old = unit.moved * (store if carried else narrow)
        if carried:
            self.whole -= old
        else:
            old += unit.upcast * (store - narrow)
        self.scatter = sent
        self.see(name, tensors, old)
        alone = own if unit.shards == 1 else 0  # one rank divides by one, into a copy
        left = 0 if alone else unit.last * (store if carried else narrow)
        self.see(name, tensors, left + own, alone)
        self.shards += 0 if again else own


def flat_ahead(layers: Sequence[Layer]) -> int:
    """Return elements of the unit that is gathered during the backward behind these parts."""
    units = (x for x in reversed(layers) if x.units.block.whole and x.kind != COPY)
    left = next(units, None)
    return 0 if left is None or left.kind in NEVER_AGAIN else left.units.block.flat


def waiting(layers: Sequence[Layer]) -> int:
    """Return bytes of the embedding's gradients that were made before its own backward."""
    return sum(x.waits for x in layers if x.kind in ("mtp", "head") and not x.late)
