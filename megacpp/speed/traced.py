"""Memory-bound work of a block, from the allocations that its trace recorded.

    forward, backward = memory_bound(trace, compiled=False)

Each result of an element-wise operator was written once, and operands of its size were read. A
compiler keeps results on chip that no product, no attention and no later pass reads: only those
that are alive when the next such operator allocates, or when the pass ends, are counted. No torch
import here.
"""

from __future__ import annotations

from functools import lru_cache

from megacpp.memory.block_trace import BlockRequest, BlockTrace
from megacpp.memory.forms.traced import trace_of
from megacpp.speed.operators import Passes

# Operators whose time is counted elsewhere: products, attention, collectives, empty memory.
COUNTED = ("mm", "expert_", "scaled_dot", "gather_into", "reduce_scatter", "all_reduce",
           "all_to_all", "empty", "linear_cross", "grouped")  # fmt: skip
COPIES = ("_to_copy", "clone", "copy_", "cat", "index", "stack", "fill", "new_zeros")
READ_AND_WRITTEN, COPIED = 3.0, 2.0  # times the bytes of the result: two operands, or one


@lru_cache(maxsize=4096)
def moved_by(
    request: BlockRequest, compiled: bool
) -> tuple[tuple[Passes, Passes], tuple[int, int]]:
    """Return `memory_bound` and `launches` of the block that a request describes."""
    trace = trace_of(request)
    return memory_bound(trace, compiled), launches(trace)


def memory_bound(trace: BlockTrace, compiled: bool) -> tuple[Passes, Passes]:
    """Return the memory-bound work of a block's forward and of its backward.

    What recomputation runs again is in the backward. Tensors that are made once for all layers,
    and those made of weights alone, aren't counted.
    """
    passes = (trace.events[: trace.forward], trace.events[trace.forward :])
    first, second = (_bytes(trace, events, compiled) for events in passes)
    return Passes(*first), Passes(*second)


def launches(trace: BlockTrace) -> tuple[int, int]:
    """Return the operators that allocate in a block's forward and in its backward."""
    before = sum(event > 0 for event in trace.events[: trace.forward])
    return before, sum(event > 0 for event in trace.events[trace.forward :])


def _bytes(trace: BlockTrace, events: tuple[int, ...], compiled: bool) -> tuple[float, int]:
    """Return bytes read and written by element-wise operators, and their number."""
    waiting: dict[int, float] = {}  # results that may stay on chip
    moved, kernels = 0.0, 0
    for event in events:
        number = abs(event) - 1
        if event < 0:
            waiting.pop(number, None)  # freed before anything but element-wise work read it
            continue
        operator = trace.names[number].partition(": ")[2]
        if any(word in operator for word in COUNTED):
            moved += sum(waiting.values())
            kernels += len(waiting) > 0
            waiting.clear()
            continue
        if trace.roles[number] in "wb":
            continue
        times = COPIED if operator.startswith(COPIES) else READ_AND_WRITTEN
        if compiled:
            waiting[number] = times * trace.bytes[number]
        else:
            moved += times * trace.bytes[number]
            kernels += 1
    return moved + sum(waiting.values()), max(1, kernels + (len(waiting) > 0))
