"""Memory-bound work of a block, as its trace counted it.

    (forward, backward), issued, replayed = moved_by(request)

No torch import here.
"""

from __future__ import annotations

from functools import lru_cache

from megacpp.memory.block_trace import BlockRequest
from megacpp.memory.forms.traced import trace_of
from megacpp.speed.operators import Passes


@lru_cache(maxsize=4096)
def moved_by(request: BlockRequest) -> tuple[tuple[Passes, Passes], tuple[int, int], int | None]:
    """Return memory-bound work, operators that are issued, and `BlockTrace.replayed`, of a block.

    The first two are of its forward and its backward. What recomputation runs again is in the
    backward. A CPU has no fused kernels: each operator reads its operands and writes its result.
    """
    trace = trace_of(request)
    first, second = trace.work
    if request.config.train.device == "cpu":
        passes = Passes(first.ran_bytes), Passes(second.ran_bytes)
        return passes, (first.ran, second.ran), trace.replayed
    passes = (
        Passes(first.kernel_bytes, max(1, first.kernels)),
        Passes(second.kernel_bytes, max(1, second.kernels)),
    )
    return passes, (first.issued, second.issued), trace.replayed
