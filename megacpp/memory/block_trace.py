"""Allocations of a forward and a backward of one block or of a few parts, as a tracer records them.

    (trace,) = trace_blocks([request])         # megacpp/cli/block_trace.py
    max(m.bytes for m in moments(trace, True)) # bytes alive at the fullest moment of its backward

A tracer runs parts of a model of a rank's own sizes without values (megacpp/cli/block_trace.py).
What stands in front of the first block is traced together, and so is what stands behind the last:
they hand each other tensors that none of them saves. The bytes of each allocation are affine in the
rows of a microbatch and in the numbers of rows that experts get, so a few traces determine all
others (`combined`). Pure data; no torch import here.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import islice
from operator import mul
from typing import Any, Literal, NamedTuple

from megacpp.config.schema import Config, DataConfig
from megacpp.memory.forms.peak_point import PeakPoint
from megacpp.model.regions import Region

# t: a tensor of tokens; g: the gradient of a weight; w: made of weights alone; o: what the block
# returns, which the next one keeps; b: made once for all layers of the batch (masks, angles);
# h: waits on the host; i: does so, and is the block's input.
Role = Literal["t", "g", "w", "o", "b", "h", "i"]
HOST, INPUT = "on the host", "input on the host"  # groups of `kept` that aren't on the device
GROUPS = {"w": "weights", "o": "residual", "h": HOST, "i": INPUT}
DOCUMENT = 1024  # tokens of one, where only data could say
# Parts of the names of operators that move no memory in passes: products, attention, collectives.
TIMED_APART = ("mm", "expert_", "scaled_dot", "gather_into", "reduce_scatter", "all_reduce",
               "all_to_all", "linear_cross", "grouped")  # fmt: skip
COPIES = ("_to_copy", "clone", "copy_", "cat", "index", "stack", "fill", "new_zeros")
EMPTY = ("empty", "new_empty")
READ_AND_WRITTEN, COPIED = 3.0, 2.0  # times the bytes of the result: two operands, or one
FILLED = 2.5  # a fused kernel reads one operand of that size forward and two backward


@dataclass(frozen=True)
class BlockRequest:
    """Inputs that determine a block's allocations: equal requests have equal traces.

    Attributes:
        config: layers of these kinds; settings that don't concern them have their defaults.
        kinds: parts that run one after the other: layers (names from `layer_kinds`), or the
            modules in front of the first block, or those behind the last.
        pieces: regions that each layer recomputes.
        context: coordinate on the axis cp.
        sharded: FSDP2 casts weights; else one process computes under autocast.
        counts: numbers that values of the batch decide (`AllocationSettings.counts`), in order.
        same: other numbers that operators depend on.
        document: tokens of a document; every row has as many documents as fit.
        apart: tokens are independent: only their number counts, in one row or in two.
        frozen: weights outside of indexers have no gradient (the warm-up of sparse attention).
        reached: the input of the first part has a gradient.
        split: the backward is two walks, for gradients of inputs and then of weights.
    """

    config: Config
    kinds: tuple[str, ...]
    pieces: tuple[frozenset[Region], ...]
    context: int
    sharded: bool
    counts: tuple[tuple[str, int], ...] = ()
    same: tuple[int, ...] = ()
    document: int = DOCUMENT
    apart: bool = False
    frozen: bool = False
    reached: bool = True
    split: bool = False

    def key(self) -> str:
        """Canonical text of the request."""
        content = _plain(self) | {"pieces": [sorted(pieces) for pieces in self.pieces]}
        return json.dumps(content, sort_keys=True, default=_plain)

    @property
    def rows(self) -> int:
        """Rows of the microbatch."""
        return self.config.train.device_batch_size

    @property
    def point(self) -> tuple[int, ...]:
        """Numbers that bytes are affine in among requests of a `group`."""
        tokens = self.config.data.seq_len if self.apart else self.rows
        return tokens, *(count for _, count in self.counts)

    @property
    def group(self) -> BlockRequest:
        """Request without its point, shared by requests whose bytes are affine in their points.

        One row stays apart from several, because gathering several rows needs a copy.
        """
        rows = self.rows if self.apart else min(self.rows, 2)
        train = replace(self.config.train, device_batch_size=rows)
        data = DataConfig(seq_len=1) if self.apart else self.config.data
        return replace(self, config=replace(self.config, train=train, data=data), counts=())


def _plain(value: Any) -> Any:
    """Return the fields of a dataclass by name, and the text of anything else, for JSON."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


class PassWork(NamedTuple):
    """Operators of a forward or backward; an item of a loop counts for all that it stands for.

    Attributes:
        ran: those that are no views.
        ran_bytes: read and written by them, without those of `TIMED_APART`.
        issued: launches of kernels, without those for what is made once for all layers.
        kernels: of them, element-wise ones of tensors of tokens, one for each result.
        kernel_bytes: read and written by these as kernels of a GPU (`kernel_bytes`).
    """

    ran: int = 0
    ran_bytes: int = 0
    issued: int = 0
    kernels: int = 0
    kernel_bytes: int = 0


@cache
def timed_apart(operator: str) -> bool:
    """Return whether an operator is one of `TIMED_APART`."""
    return any(word in operator for word in TIMED_APART)


def kernel_bytes(operator: str, size: int) -> float:
    """Return bytes that a GPU's kernel reads and writes for an element-wise result of a size.

    Each result was written once, and operands of its size were read. So was empty memory, by a
    Triton kernel or by an operator that is given its result. The trace of a compiled block has the
    results that its kernels write.
    """
    if operator.startswith(EMPTY):
        return FILLED * size
    return (COPIED if operator.startswith(COPIES) else READ_AND_WRITTEN) * size


@dataclass(frozen=True)
class BlockTrace:
    """Allocations and frees of a block, or of parts that run one after the other.

    Attributes:
        bytes: size of each allocation, as its tensor requests.
        names: `path below the block: operator` of each allocation.
        roles: a `Role` of each allocation.
        events: n + 1 allocates allocation n, -(n + 1) frees it.
        forward: number of events of the forward.
        added: by allocation, the event by which a weight's gradient is in the sum of all
            microbatches.
        marks: (event, place of the part that runs from there on); place 0 before the first.
        replayed: FLOPs of products that the backward of a compiled block runs again; None: the
            recompute policy decides what runs again.
        weights: number of the first event of the walk for weights; 0: there is one walk.
        ended: number of events when autocast is left, which frees the casts that no part saved.
        work: of the forward and of the backward.
    """

    bytes: tuple[int, ...]
    names: tuple[str, ...]
    roles: str
    events: tuple[int, ...]
    forward: int
    added: dict[int, int]
    marks: tuple[tuple[int, int], ...] = ()
    replayed: int | None = None
    weights: int = 0
    ended: int = 0
    work: tuple[PassWork, PassWork] = (PassWork(), PassWork())

    def as_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads, for JSON."""
        return _plain(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> BlockTrace:
        """Return the trace that `as_dict` wrote."""
        lists = {name: tuple(content[name]) for name in ("bytes", "events")}
        lists["names"] = tuple(map(sys.intern, content["names"]))  # few, each in many traces
        added = {int(number): at for number, at in content["added"].items()}
        marks = tuple((event, place) for event, place in content["marks"])
        numbers = ("forward", "replayed", "weights", "ended")
        words = {name: content[name] for name in ("roles", *numbers)}
        first, second = (PassWork(*counts) for counts in content["work"])
        return BlockTrace(**lists, **words, added=added, marks=marks, work=(first, second))

    def like(self, other: BlockTrace) -> bool:
        """Whether both have the same events, whatever their bytes."""
        here, there = (replace(x, bytes=(), replayed=None, work=()) for x in (self, other))
        return here == there


def combined(traces: Sequence[BlockTrace], weights: Sequence[Fraction]) -> BlockTrace | None:
    """Return the trace whose bytes are a weighted sum of others'; None: bytes aren't whole numbers.

    Args:
        traces: all have the same events.
        weights: one for each trace, 1 in all.
    """
    sizes = [
        sum((w * n for w, n in zip(weights, each, strict=True)), Fraction())
        for each in zip(*(trace.bytes for trace in traces), strict=True)
    ]
    if any(size.denominator != 1 or size < 0 for size in sizes):
        return None
    again = None
    if traces[0].replayed is not None:
        found = zip(weights, (trace.replayed or 0 for trace in traces), strict=True)
        again = int(sum((w * n for w, n in found), Fraction()))
    first, second = (
        PassWork(*(int(sum(map(mul, weights, counts))) for counts in zip(*passes, strict=True)))
        for passes in zip(*(trace.work for trace in traces), strict=True)
    )
    return replace(traces[0], bytes=tuple(map(int, sizes)), replayed=again, work=(first, second))


def affine_weights(
    points: Sequence[Sequence[int]], wanted: Sequence[int]
) -> tuple[Fraction, ...] | None:
    """Return weights, 1 in all, that combine points to `wanted`; None: it isn't in their span.

    Args:
        points: affinely independent.
        wanted: a point of as many dims.
    """
    table = [
        [*(Fraction(x) for x in column), Fraction(goal)]
        for *column, goal in zip(*((1, *point) for point in (*points, wanted)), strict=True)
    ]
    for n in range(len(points)):
        pivot = next((row for row in table[n:] if row[n]), None)
        if pivot is None:
            return None
        table.remove(pivot)
        pivot = [x / pivot[n] for x in pivot]
        table = [[x - row[n] * y for x, y in zip(row, pivot, strict=True)] for row in table]
        table.insert(n, pivot)
    if any(row[-1] for row in table[len(points) :]):
        return None
    return tuple(row[-1] for row in table[: len(points)])


def kept(trace: BlockTrace, place: int = 0) -> Counter[str]:
    """Return bytes of a part that are alive when the forward has ended, by module path.

    Tensors made of weights alone are under `weights`, the result of the last part, which the next
    block saves, is under `residual`, and what has left the device under `HOST` and `INPUT`.
    """
    found: Counter[str] = Counter()
    for number, owner in _alive(trace).items():
        role = trace.roles[number]
        path = trace.names[number].partition(":")[0]
        if role != "b" and owner == place and path:  # else of no part: a sum of losses
            found[GROUPS.get(role, path)] += trace.bytes[number]
    return found


def copies(trace: BlockTrace, place: int = 0) -> tuple[int, int]:
    """Return bytes of copies of weights that a part saves, and that only autocast remembers.

    The second are casts that run again in the backward: they are freed when the whole model's
    forward has ended.
    """
    saved, ended = _alive(trace), _alive(trace, trace.ended)
    mine = [n for n, made_by in saved.items() if made_by == place and trace.roles[n] == "w"]
    others = [n for n, made_by in ended.items() if made_by == place and n not in saved]
    return sum(trace.bytes[n] for n in mine), sum(trace.bytes[n] for n in others)


def left_between(trace: BlockTrace, place: int = 0) -> int:
    """Return bytes that a part has alive between the two walks of its backward.

    Its result, which the next block or the pipeline keeps, isn't counted.
    """
    alive = _alive(trace, trace.weights).items()
    return sum(trace.bytes[n] for n, at in alive if at == place and trace.roles[n] not in "bhiow")


def moments(
    trace: BlockTrace,
    backward: bool,
    first: bool = False,
    place: int = 0,
    walk: str = "",
) -> Iterator[PeakPoint]:
    """Yield moments of a part's forward or backward at which bytes stop growing.

    Tensors that the parts in front save aren't counted, nor gradients of weights of those behind.

    Args:
        trace: of the part.
        backward: moments of the backward; else of the forward.
        first: for the layer that makes the tensors that all layers of a batch share; those that
            stay belong to the batch and aren't counted.
        place: of the part.
        walk: of a split backward: `inputs` or `weights`.
    """
    begin, end = trace.forward if backward else 0, len(trace.events)
    begin = trace.weights if walk == "weights" else begin
    end = trace.weights if walk == "inputs" else end if backward else trace.forward
    skipped = "hi" + ("" if first else "b")
    gradients, owner = 0, dict[int, int]()
    tensors = -sum(trace.bytes[n] for n in _stays(trace)) if first else 0
    tensors -= sum(
        trace.bytes[n]
        for n, made_by in _alive(trace, 0 if backward else trace.ended).items()
        if made_by < place and trace.roles[n] not in skipped + "b"
    )
    fresh: dict[int, int] = {}  # gradients that aren't in a sum yet
    grew: PeakPoint | None = None
    for index, (event, running) in enumerate(_placed(trace)):
        number, sign = abs(event) - 1, 1 if event > 0 else -1
        role, size = trace.roles[number], sign * trace.bytes[number]
        if sign > 0:
            owner[number] = running
        own = role == "g" and owner[number] == place
        if role in skipped or (role == "g" and owner[number] > place):
            continue
        if own:
            gradients += size
        else:
            tensors += size
        if fresh:
            fresh = {n: b for n, b in fresh.items() if trace.added[n] > index and n != number}
        if own and sign > 0:
            fresh[number] = size
        inside = begin <= index < end and running == place
        if grew is not None and (sign < 0 or not inside):
            yield grew
            grew = None
        if inside and sign > 0:
            name = trace.names[number].partition(": ")[2]
            grew = PeakPoint(name, tensors, gradients, fresh=sum(fresh.values()))
    if grew is not None:
        yield grew


def _placed(trace: BlockTrace) -> Iterator[tuple[int, int]]:
    """Yield each event and the place of the part that runs."""
    marks, running = dict(trace.marks), 0
    for index, event in enumerate(trace.events):
        running = marks.get(index, running)
        yield event, running


def _alive(trace: BlockTrace, until: int = 0) -> dict[int, int]:
    """Return the allocations alive when the forward has ended, with the place of their maker.

    Or before event `until`.
    """
    found: dict[int, int] = {}
    for event, running in islice(_placed(trace), until or trace.forward):
        if event > 0:
            found[event - 1] = running
        else:
            del found[-event - 1]
    return found


def _stays(trace: BlockTrace) -> set[int]:
    """Return the allocations for the batch that no part frees."""
    made = {n for n, role in enumerate(trace.roles) if role == "b"}
    return made - {-event - 1 for event in trace.events if event < 0}
