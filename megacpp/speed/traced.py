"""Memory-bound work of a block, from the allocations that its trace recorded.

    forward, backward = memory_bound(trace)

Each result of an element-wise operator was written once, and operands of its size were read. So was
empty memory, by a Triton kernel or by an operator that is given its result. The trace of a compiled
block has the results that its kernels write. No torch import here.
"""

from __future__ import annotations

from functools import lru_cache

from megacpp.memory.block_trace import TIMED_APART, BlockRequest, BlockTrace
from megacpp.memory.forms.traced import trace_of
from megacpp.speed.operators import Passes

COPIES = ("_to_copy", "clone", "copy_", "cat", "index", "stack", "fill", "new_zeros")
EMPTY = ("empty", "new_empty")
READ_AND_WRITTEN, COPIED = 3.0, 2.0  # times the bytes of the result: two operands, or one
FILLED = 2.5  # a fused kernel reads one operand of that size forward and two backward


@lru_cache(maxsize=4096)
def moved_by(
    request: BlockRequest,
) -> tuple[tuple[Passes, Passes], tuple[int, int], int | None]:
    """Return `memory_bound`, `launches` and `BlockTrace.replayed` of a requested block.

    A CPU has no fused kernels: each operator reads its operands and writes its result.
    """
    trace = trace_of(request)
    if request.config.train.device == "cpu":
        forward, backward = trace.ran
        return (Passes(forward[1]), Passes(backward[1])), (forward[0], backward[0]), trace.replayed
    return memory_bound(trace), launches(trace), trace.replayed


def memory_bound(trace: BlockTrace) -> tuple[Passes, Passes]:
    """Return the memory-bound work of a block's forward and of its backward.

    What recomputation runs again is in the backward. Tensors that are made once for all layers,
    and those made of weights alone, aren't counted.
    """
    passes = (trace.events[: trace.forward], trace.events[trace.forward :])
    first, second = (_bytes(trace, events) for events in passes)
    return Passes(*first), Passes(*second)


def launches(trace: BlockTrace) -> tuple[int, int]:
    """Return the operators that allocate in a block's forward and in its backward.

    What is made once for all layers isn't counted.
    """
    passes = (trace.events[: trace.forward], trace.events[trace.forward :])
    first, second = (sum(n > 0 and trace.roles[n - 1] != "b" for n in events) for events in passes)
    return first, second


def _bytes(trace: BlockTrace, events: tuple[int, ...]) -> tuple[float, int]:
    """Return bytes read and written by element-wise operators, and their number."""
    moved, kernels = 0.0, 0
    for event in events:
        number = event - 1
        if event < 0 or trace.roles[number] in "wb":
            continue
        operator = trace.names[number].partition(": ")[2]
        if not any(word in operator for word in TIMED_APART):
            times = COPIED if operator.startswith(COPIES) else READ_AND_WRITTEN
            times = FILLED if operator.startswith(EMPTY) else times
            moved += times * trace.bytes[number]
            kernels += 1
    return moved, max(1, kernels)
