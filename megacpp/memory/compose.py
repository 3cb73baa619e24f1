"""Compose the step of a deep model from the traced step of a shallow one with all its kinds.

A layer allocates the same wherever it stands. Only the sizes of its neighbours differ: in its
backward FSDP2 gathers the parameters of the layer before it and frees the gradients of the layer
after it, and the residual stream between two layers is freed by the other one. So the events of a
traced layer are replayed for every layer that it represents. Events that belong to a neighbour are
replaced by those of the layer that was traced for this neighbour.

The first layer and the last represent themselves alone (`shallow`). A stage of a pipeline is traced
in a pipeline of as many stages. Each of these has the same few layers, or one layer that a choice
of keys comes from or goes to. Pure data, no torch.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from megacpp.blocks.features import entrance, exit_parts
from megacpp.config.schema import Config, ModelConfig
from megacpp.memory.forms.traced import layer_parts
from megacpp.memory.stream import Stream, StreamBlock
from megacpp.model.pattern import ENTRANCE, EXIT, layer_kinds, with_kinds
from megacpp.model.stages import stage_parts, stages_per_rank

Phase = Literal["forward", "backward"]
Event = tuple[int, int]  # block of the traced stream, +1 or -1
Sign = tuple[int, str]  # of an event, and the component of its block
NEAR = 1  # layers away: whose parameters are gathered, and gradients let go, during another's turn


@dataclass(frozen=True)
class Shallow:
    """Model to trace in place of a deeper one.

    Attributes:
        model: with few layers.
        parts: (part of the deep model, traced part) for each part that the rank runs, in order.
    """

    model: ModelConfig
    parts: tuple[tuple[str, str], ...]


def shallow(config: Config, size: int, rank: int) -> Shallow | None:
    """Return a model with a rank's first layer, one layer of each kind in between, and the last.

    None: it would have no fewer layers, layers differ by their place in a group of streams, or a
    rank of the pipeline has several stages.
    """
    model, mesh = config.model, config.mesh
    if any(part.grouped for part in layer_parts(config)):
        return None  # layers of a kind differ by their place in one
    kinds = layer_kinds(model)
    layers, first, last, stage = range(len(kinds)), True, True, 0
    takes = hands = None
    if mesh.pp > 1:
        if stages_per_rank(mesh.pp_schedule) > 1:
            return None
        stage = rank // (size // mesh.pp)
        part = stage_parts(model, mesh, stage)[0]
        layers, first, last = part.layers, part.first, part.last
        takes, hands = part.takes, part.hands
    own = kinds[layers.start : layers.stop]
    between = list(dict.fromkeys(own[1:-1]))
    few = [own[0], *between, own[-1]]
    if len(few) >= len(own):
        return None
    standing = [0, *(1 + between.index(kind) for kind in own[1:-1]), len(few) - 1]
    stages = [few] * mesh.pp
    if takes is not None or hands is not None:  # a choice of keys comes or goes, as in the model
        after = ["A.index" if hands is None else "A.share"]
        stages = [["A.index"]] * stage + [few] + [after] * (mesh.pp - stage - 1)
    ahead = sum(map(len, stages[:stage]))
    parts = [(name, name) for name in entrance(model)] if first else []
    parts += [(f"blocks.{i}", f"blocks.{ahead + j}") for i, j in zip(layers, standing, strict=True)]
    parts += [(name, name) for name in exit_parts(model)] if last else []
    traced = with_kinds(model, [kind for few_kinds in stages for kind in few_kinds])
    pattern = "|".join("".join(kind[0] for kind in layers_of) for layers_of in stages)
    cut = dataclasses.replace(traced, pattern=pattern)
    return Shallow(cut, tuple(parts))


@dataclass(frozen=True)
class Whole:
    """Deep model to compose.

    Attributes:
        parts: see `Shallow`.
        root: factor for the buffers of the root unit, which holds parameters of all layers.
        optimizer: most bytes of temporaries in the optimizer step.
        first_alone: numbers of blocks that the first layer of a kind makes for all.
    """

    parts: Sequence[tuple[str, str]]
    root: float
    optimizer: int
    first_alone: frozenset[int]


def compose(few: Stream, whole: Whole) -> Stream:
    """Return the deep model's stream, from that of the shallow model."""
    return _Composer(few, whole).run()


class _Composer:
    """Replay of a shallow model's events; parts are numbered in forward order, in both models."""

    def __init__(self, few: Stream, whole: Whole) -> None:
        self.few, self.whole, self.out = few, whole, Stream()
        self.parts = [name for name, _ in whole.parts]
        self.traced_parts = sorted({traced for _, traced in whole.parts}, key=_order)
        self.stands = [self.traced_parts.index(traced) for _, traced in whole.parts]
        self.places: dict[int, list[int]] = defaultdict(list)  # of a traced part: of whom it is
        for place, traced_part in enumerate(self.stands):
            self.places[traced_part].append(place)
        numbers = {name: i for i, name in enumerate(self.traced_parts)}
        self.owner = [numbers.get(block.part) for block in few.blocks]
        self.alive: dict[tuple[int | None, int], int] = {}

    def run(self) -> Stream:
        """Return the stream of the deep model."""
        sections = list(_sections(self.few))
        self._everywhere(sections[0][1])
        index = 1
        while index < len(sections):
            phase, passed = _phase(sections[index][0]), {}
            if phase is None:
                self._stage(*sections[index])
                index += 1
                continue
            before = None
            while index < len(sections) and _phase(sections[index][0]) == phase:
                name, events = sections[index]
                part = self.traced_parts.index(name.partition(" ")[2])
                if before is not None and (part <= before) == (phase == "forward"):
                    break  # the next microbatch
                passed[part], before = events, part
                index += 1
            self._pass(phase, passed)
        return self.out

    def _stage(self, name: str, events: list[Event]) -> None:
        """Replay events of the step that belong to no layer, such as the optimizer's."""
        self.out.mark(name)
        if name == "optimizer" and self.whole.optimizer:
            needed = StreamBlock(
                self.whole.optimizer, "muon_transient", "", "temporaries of the step"
            )
            self.out.free(self.out.allocate(needed))
        self._everywhere(events)

    def _pass(self, phase: Phase, passed: dict[int, list[Event]]) -> None:
        """Replay one forward or one backward of all parts."""
        places = range(len(self.parts))
        for place in places if phase == "forward" else reversed(places):
            self.out.mark(f"{phase} {self.parts[place]}")
            if self._is_layer(place):
                self._layer(phase, place, passed)
            else:
                self._everywhere(passed.get(self.stands[place], ()))

    def _is_layer(self, place: int) -> bool:
        return self.parts[place].startswith("blocks.")

    def _layer(self, phase: Phase, place: int, passed: dict[int, list[Event]]) -> None:
        """Replay one layer's forward or backward, with the events of its neighbours in it."""
        traced = self.stands[place]
        events = passed.get(traced, [])
        near = {
            offset: self._of_neighbour(place + offset, -offset, passed)
            for offset in range(-NEAR, NEAR + 1)
            if offset and 0 <= place + offset < len(self.parts)
        }
        left: dict[tuple[int, Sign], int] = defaultdict(int)
        for event in events:
            offset = self._offset(event, traced)
            if offset in near:
                left[offset, self._sign(event)] += 1
        # What FSDP2 does for others while it gathers, of which the traced neighbours had none.
        unasked = (-1 if phase == "forward" else 1, "communication")
        for event in events:
            owner, offset = self.owner[event[0]], self._offset(event, traced)
            if owner == traced:
                if self.few.blocks[event[0]].component != "communication":
                    for other in near:
                        while near[other][unasked] and not left[other, unasked]:
                            self._emit(place + other, near[other][unasked].popleft())
                self._emit(place, event)
            elif offset in near:
                sign = self._sign(event)
                left[offset, sign] -= 1
                queue = near[offset][sign]
                while queue and (len(queue) > left[offset, sign]):
                    self._emit(place + offset, queue.popleft())
            elif place == self.places[traced][0]:
                self._everywhere([event])
        for offset, queues in near.items():
            for queue in queues.values():
                for event in queue:
                    self._emit(place + offset, event)

    def _of_neighbour(
        self, place: int, offset: int, passed: dict[int, list[Event]]
    ) -> dict[Sign, deque[Event]]:
        """Return events of the part at `place` while the part `offset` away from it runs."""
        traced = self.stands[place]
        found: dict[Sign, deque[Event]] = defaultdict(deque)
        for event in passed.get(traced + offset, ()):
            if self.owner[event[0]] == traced:
                found[self._sign(event)].append(event)
        return found

    def _offset(self, event: Event, traced: int) -> int | None:
        owner = self.owner[event[0]]
        return None if owner is None else owner - traced

    def _sign(self, event: Event) -> Sign:
        return event[1], self.few.blocks[event[0]].component

    def _everywhere(self, events: Iterable[Event]) -> None:
        """Replay events for every part that their block's part represents; else once."""
        for owner, run in groupby(events, key=lambda event: self.owner[event[0]]):
            found = list(run)
            for place in [None] if owner is None else self.places[owner]:
                for event in found:
                    self._emit(place, event)

    def _emit(self, place: int | None, event: Event) -> None:
        """Append an event of a part, unless its block is already alive, or already freed."""
        number, sign = event
        if (
            place is not None
            and number in self.whole.first_alone
            and place != self.places[self.stands[place]][0]
        ):
            return
        key = place, number
        if sign < 0:
            if key in self.alive:
                self.out.free(self.alive.pop(key))
        elif key not in self.alive:
            block = self.few.blocks[number]
            if block.part == "root":
                block = dataclasses.replace(block, bytes=round(block.bytes * self.whole.root))
            elif place is not None:
                block = dataclasses.replace(block, part=self.parts[place])
            self.alive[key] = self.out.allocate(block)


def _order(part: str) -> tuple[int, int]:
    """Return the sort key of a part in forward order."""
    name, _, number = part.partition(".")
    return (*ENTRANCE, "blocks", *EXIT).index(name), int(number or 0)


def _phase(name: str) -> Phase | None:
    word = name.partition(" ")[0]
    return word if word in ("forward", "backward") else None  # type: ignore[return-value]


def _sections(stream: Stream) -> Iterator[tuple[str, list[Event]]]:
    """Yield (mark, its events), empty ones included; events before any mark have an empty name."""
    changes = list(stream.changes())
    starts = [0, *(start for start, _ in stream.marks), len(changes)]
    names = ["", *(name for _, name in stream.marks)]
    for name, start, end in zip(names, starts[:-1], starts[1:], strict=True):
        yield name, changes[start:end]
