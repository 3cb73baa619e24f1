"""Counts the collectives that a rank issues: which operation, how many, how many bytes.

    with CollectiveCounter() as seen:
        loss.backward()
    assert seen.count("reduce_scatter") == 3
    assert seen.bytes("all_gather", torch.bfloat16) == 2 * 1000

It is the log of parallel/simulate/collective_log.py without point-to-point calls. `CollectiveLog`
also names the mesh axis of each call.
"""

from __future__ import annotations

from typing import Any

from parallel.simulate.collective_log import POINT_TO_POINT, Collective, CollectiveLog

__all__ = ["Collective", "CollectiveCounter"]


class CollectiveCounter(CollectiveLog):
    """Records every collective issued inside the `with` block, in order, as `calls`."""

    def _call(self, kind: str, *args: Any) -> Collective | None:
        return None if kind in POINT_TO_POINT else super()._call(kind, *args)
