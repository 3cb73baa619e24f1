"""Allocations of one block's forward and backward, in order: what a tracer writes down once.

    trace = traced_block(own, "R", pieces)     # megacpp/memory/forms/traced.py
    max(m.bytes for m in moments(trace, True)) # bytes alive at the fullest moment of its backward

A tracer runs a block of a rank's own sizes without values (megacpp/cli/block_trace.py). The bytes
of each allocation are affine in the rows of a microbatch, so two traces tell of any number of rows
(`between`). Pure data; no torch import here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megacpp.config.schema import Config
from megacpp.memory.forms.moment import Moment
from megacpp.model.regions import Region

# t: a tensor of tokens; g: the gradient of a weight; w: made of weights alone; o: what the block
# returns, which the next one keeps.
Role = Literal["t", "g", "w", "o"]


@dataclass(frozen=True)
class BlockRequest:
    """What the allocations of a block hang on: equal requests have equal traces.

    Attributes:
        config: of one layer of the kind, with all that doesn't concern it left at its default.
        kind: a letter.
        pieces: what the block runs again.
        context: coordinate on the axis cp.
        sharded: FSDP2 casts weights; else one process computes under autocast.
    """

    config: Config
    kind: str
    pieces: frozenset[Region]
    context: int
    sharded: bool

    def key(self) -> str:
        """Canonical text of the request."""
        content = asdict(self) | {"pieces": sorted(self.pieces)}
        return json.dumps(content, sort_keys=True, default=str)

    def of_rows(self, rows: int) -> BlockRequest:
        """Return the request for a microbatch of so many rows."""
        train = replace(self.config.train, device_batch_size=rows)
        return replace(self, config=replace(self.config, train=train))


@dataclass(frozen=True)
class BlockTrace:
    """Allocations and frees of a block.

    Attributes:
        bytes: of each allocation, as its tensor asks for.
        names: `path below the block: operator` of each.
        roles: a `Role` of each.
        events: n + 1 allocates allocation n, -(n + 1) frees it.
        forward: number of events of the forward.
        added: event by which a weight's gradient is in the sum of all microbatches, by allocation.
    """

    bytes: tuple[int, ...]
    names: tuple[str, ...]
    roles: str
    events: tuple[int, ...]
    forward: int
    added: dict[int, int]

    def as_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> BlockTrace:
        """Return the trace that `as_dict` wrote."""
        lists = {name: tuple(content[name]) for name in ("bytes", "names", "events")}
        added = {int(number): at for number, at in content["added"].items()}
        return BlockTrace(**lists, roles=content["roles"], forward=content["forward"], added=added)

    def like(self, other: BlockTrace) -> bool:
        """Whether both have the same events, whatever their bytes."""
        return replace(self, bytes=()) == replace(other, bytes=())


def between(first: BlockTrace, second: BlockTrace, at: tuple[int, int], rows: int) -> BlockTrace:
    """Trace of `rows` rows from traces of two other numbers of rows, by a straight line.

    Args:
        first: of `at[0]` rows.
        second: of `at[1]` rows; with the events of the first.
        at: their numbers of rows.
        rows: wanted.
    """
    assert first.like(second)
    step, rest = at[1] - at[0], rows - at[0]
    sizes = tuple(
        a + (b - a) * rest // step for a, b in zip(first.bytes, second.bytes, strict=True)
    )
    return replace(first, bytes=sizes)


def kept(trace: BlockTrace) -> Counter[str]:
    """Return bytes alive when the forward has ended, by module path.

    What is made of weights alone is under `weights`. The block's result isn't among them: the next
    block keeps it.
    """
    alive: set[int] = set()
    for event in trace.events[: trace.forward]:
        (alive.add if event > 0 else alive.discard)(abs(event) - 1)
    found: Counter[str] = Counter()
    for number in alive:
        role = trace.roles[number]
        if role != "o":
            path = trace.names[number].partition(":")[0]
            found["weights" if role == "w" else path] += trace.bytes[number]
    return found


def moments(trace: BlockTrace, backward: bool, weights: bool) -> Iterator[Moment]:
    """Yield moments of the forward or of the backward at which bytes stop growing.

    Args:
        backward: of it; else of the forward.
        weights: count what is made of weights alone, other than their casts by autocast.
    """
    skipped = "" if weights else "w"
    tensors = gradients = 0
    fresh: dict[int, int] = {}  # gradients that aren't in a sum yet
    grew: Moment | None = None
    for index, event in enumerate(trace.events):
        number, sign = abs(event) - 1, 1 if event > 0 else -1
        role, size = trace.roles[number], sign * trace.bytes[number]
        if role in skipped:
            continue
        if role == "g":
            gradients += size
        else:
            tensors += size
        if fresh:
            fresh = {n: b for n, b in fresh.items() if trace.added[n] > index and n != number}
        if role == "g" and sign > 0:
            fresh[number] = size
        inside = (index >= trace.forward) == backward
        if grew is not None and (sign < 0 or not inside):
            yield grew
        if inside and sign > 0:
            name = "sum" if role == "o" else trace.names[number].partition(": ")[2]
            grew = Moment(name, tensors, gradients, fresh=sum(fresh.values()))
        else:
            grew = None
    if grew is not None:
        yield grew
