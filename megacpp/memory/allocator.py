"""Bytes that a GPU's caching allocator reserves for the allocations of a step.

    found = replay(stream)                             # trace_step(...) gives a stream
    found.reserved_bytes                               # bytes that the device reports
    replay(stream, expandable=True).reserved_bytes     # with expandable_segments:True
    replay(stream, limit=80 * 2**30).out_of_memory     # the allocation that doesn't fit, or None

Tensors request bytes. The allocator hands out blocks (rounded up, sometimes with a rest that isn't
worth splitting off) and reserves segments of the device's memory, parts of which are free at any
time: fragmentation. A freed block is free at once here, so PyTorch's active bytes are the allocated
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megacpp.memory.caching import MIB, CachingAllocator, Chunk, Listener
from megacpp.memory.stream import Stream, StreamBlock

# Of what the pools of all streams hold at their fullest: expected, and at most. From replays of
# two and three steps, from the weights on (bench/allocator.py, bench/torchtitan_peaks.py), in GiB:
#                                             tensors  beside   default   expandable
#   dense_110m, 4 layers, 1 rank                1.94     0       20.6 %      6.6 %
#   hybrid_400m, 8 layers, 1 rank               5.54     0        4.7 %      5.9 %
#   moe_small, 6 layers, 1 rank                 2.71     0        8.2 %      1.8 %
#   nam56r_quarter, AEMRF, 1 rank              13.02     0        4.1 %      0.6 %
#   moe_small, 4 layers, 8 ranks                1.55    0.10     12.8 %      4.9 %
#   dense_110m, 8 ranks                         4.91    0.13      5.2 %      2.2 %
#   nam52_deep, 6 layers, 1 row, TP 2 EP 4      2.91    0.42     10.5 %      4.0 %
#   nam56r, AEMRF, TP 2 EP 4, 8 ranks           4.82    0.40     10.5 %      2.3 %
#   nam56r, AEMRF, EP 8, 2 rows, 8 ranks        7.00    0.40      9.5 %      9.3 %
#   nam56r, AEMRF, TP 2 EP 4, 64 ranks          4.09    0.07     11.2 %      2.3 %
#   hybrid_400m, 8 layers, CP 2, 16 ranks       2.84    0.10     14.0 %      4.2 %
#   nam56r, 13 layers, TP 2 EP 4, 8 ranks       7.72    0.74      9.0 %      2.5 %
#   Llama-3.1-8B, 8 ranks                      68.63    6.15     10.3 %      5.8 %
#   Llama-3.1-8B, 128 ranks                    58.12    2.60     11.1 %      6.9 %
SHARES = {False: (0.09, 0.12), True: (0.05, 0.10)}  # by whether segments are expandable
# The same of what tensors hold, where nobody knows what is beside: 4 to 26 %, 1 to 19 %.
SHARES_WITH_BESIDE = {False: (0.16, 0.25), True: (0.11, 0.20)}
AT_LEAST = {False: 192 * MIB, True: 64 * MIB}  # of a bound: whole segments, however small a model
# Of one or two layers with large rows a share knows too little: a block that fits no hole gets a
# segment of its own, and holes are as large as what one layer makes and frees while it runs. (The
# bound takes all that it has alive: a policy that keeps less mustn't have the larger one.) Such
# models, in GiB:                       tensors  temporaries  default   expandable
#   dense_110m, F, 128 rows of 1024         4.20     2.19      32.1 %      15.1 %
#   dense_110m, AF, 128 rows                5.57     2.19      17.9 %      10.3 %
#   moe_small, AE, 64 rows                  2.61     0.93      48.3 %       7.1 %
#   moe_small, AE, 64 rows, EP 8, 8 ranks   2.82     1.77      37.3 %      23.7 %
#   nam56r_quarter, R, 16 rows              1.51     0.98      52.1 %      45.8 %
HOLES = {False: 1.0, True: 0.5}  # of a bound: of the fullest layer, what it keeps included


def allocator_overhead(
    allocated_bytes: int, expandable: bool, beside: int | None = None, one_layer: int = 0
) -> tuple[int, int]:
    """Return bytes reserved beyond those of tensors: expected, and at most.

    Args:
        allocated_bytes: bytes of tensors at the fullest moment of a step.
        expandable: with `expandable_segments:True`.
        beside: `beside_bytes` of the step; 0 on one rank; None: not known, so larger shares count.
        one_layer: most bytes that one layer has alive while it runs.
    """
    if beside is None:
        expected, most = (share * allocated_bytes for share in SHARES_WITH_BESIDE[expandable])
    else:
        held = allocated_bytes + beside
        expected, most = (beside + share * held for share in SHARES[expandable])
    return int(expected), int(most + HOLES[expandable] * one_layer) + AT_LEAST[expandable]


def beside_bytes(stream: Stream) -> int:
    """Return the sum of every stream's own peak, less the peak of all streams together, in bytes.

    FSDP2 gathers weights on one stream and reduces gradients on another. The memory of these
    streams stays reserved when activations are at their fullest and no gradient is alive.
    """
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for number, sign in stream.changes():
        block = stream.blocks[number]
        now[block.stream] += sign * block.bytes
        most[block.stream] = max(most[block.stream], now[block.stream])
    return most.total() - stream.peak()[1]


@dataclass(frozen=True)
class OutOfMemory:
    """Allocation that failed for lack of memory.

    Attributes:
        event: its number in the stream.
        block: block that was to be allocated.
        reserved_bytes: reserved then, after all cached memory was given back.
        allocated_bytes: the part of these in blocks handed out.
        where: name of the part of the step.
    """

    event: int
    block: StreamBlock
    reserved_bytes: int
    allocated_bytes: int
    where: str


@dataclass(frozen=True)
class Replay:
    """Result of running a stream through an allocator.

    Attributes:
        requested_bytes: most bytes that tensors requested at a time: the stream's peak.
        allocated_bytes: most bytes in blocks handed out.
        reserved_bytes: most bytes reserved.
        event: first event after which that many were reserved.
        fragmentation_bytes: reserved after that event and not allocated.
        by_component: bytes requested at that event, by component.
        segments: number of segments reserved then.
        retries: times that cached memory had to go back to the device first.
        marks: (name, bytes reserved at its end) of each part of the step.
        out_of_memory: the failed allocation that ended the replay, or None.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    event: int
    fragmentation_bytes: int
    by_component: dict[str, int]
    segments: int
    retries: int
    marks: list[tuple[str, int]]
    out_of_memory: OutOfMemory | None


def stream_of(block: StreamBlock) -> int:
    """Return the device stream that a block was allocated on."""
    return block.stream


def replay(
    stream: Stream,
    expandable: bool = False,
    limit: int | None = None,
    pools: Callable[[StreamBlock], int] = stream_of,
    listener: Listener | None = None,
) -> Replay:
    """Run a stream of allocations through an allocator.

    Args:
        stream: allocations and frees of a step.
        expandable: as with `expandable_segments:True`.
        limit: bytes of the device that may be reserved; None: any.
        pools: gives the device stream of a block; each stream has pools of its own.
        listener: is called at every change of the allocator.
    """
    allocator = CachingAllocator(expandable, limit, listener)
    requested = now = allocated = reserved = segments = fragmentation = 0
    at, failed, line = -1, None, []
    for event, block, chunk in drive(stream, allocator, pools):
        if chunk is None:
            failed = OutOfMemory(
                event, block, allocator.reserved, allocator.allocated, stream.where(event)
            )
            break
        now += -block.bytes if chunk.free else block.bytes
        requested = max(requested, now)
        allocated = max(allocated, allocator.allocated)
        line.append(allocator.reserved)
        if allocator.reserved > reserved:
            reserved, at = allocator.reserved, event
            segments = sum(map(bool, allocator.segments.values()))
            fragmentation = reserved - allocator.allocated
    return Replay(
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        event=at,
        fragmentation_bytes=fragmentation,
        by_component=stream.by_component(at),
        segments=segments,
        retries=allocator.retries,
        marks=list(_at_ends(stream.marks, line)),
        out_of_memory=failed,
    )


def drive(
    stream: Stream, allocator: CachingAllocator, pools: Callable[[StreamBlock], int] = stream_of
) -> Iterator[tuple[int, StreamBlock, Chunk | None]]:
    """Yield (event, block, its chunk after it) of every event; end where memory runs out.

    A block of 0 bytes gets an empty chunk.
    """
    held: dict[int, Chunk] = {}
    for event, (number, sign) in enumerate(stream.changes()):
        block = stream.blocks[number]
        if sign > 0:
            chunk = allocator.allocate(block.bytes, pools(block))
            if chunk is not None:
                held[number] = chunk
        else:
            allocator.free(chunk := held.pop(number))
        yield event, block, chunk
        if chunk is None:
            return


def _at_ends(marks: list[tuple[int, str]], line: list[int]) -> Iterator[tuple[str, int]]:
    """Yield each mark's name with the last value of `line` before the next mark."""
    ends = [*(start for start, _ in marks), len(line)][1:]
    for (start, name), end in zip(marks, ends, strict=bool(marks)):
        if start < len(line):
            yield name, line[min(end, len(line)) - 1] if end else 0
