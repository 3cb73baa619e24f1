"""Bytes of activations that are offloaded to the host, and of those that stay, by its rules.

Sizes in, bytes out: nothing here uses tensors. The rules are those of checkpointing/offload.py, for
storages in the order in which a forward saves them:

    smaller than min_bytes          stays
    no buffer left in host_bytes    stays
    among the last window_bytes     is copied, but stays on the device too
    the others                      leave the device, and come back in the backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadBytes:
    """Bytes of the forwards in flight.

    Attributes:
        out: copied to the host, of all forwards.
        back: copied to the device again.
        host: buffers that the host holds, rounded as its allocator rounds them.
        stays: on the device at the end of the last forward: small storages, and those without a
            buffer.
        window: on the device as well, while they are copied out.
        peak: most offload bytes on the device: `stays`, a window of storages that leave and one of
            those that come back.
    """

    out: int
    back: int
    host: int
    stays: int
    window: int
    peak: int


def offload_bytes(
    storages: Sequence[int],
    min_bytes: int,
    host_bytes: int,
    window_bytes: int = 256 << 20,
    forwards: int = 1,
    pinned: bool = True,
) -> OffloadBytes:
    """Return bytes that leave and stay, for storages of microbatches in flight.

    Args:
        storages: bytes of each, in the order in which a forward saves them.
        min_bytes: smaller storages stay.
        host_bytes: room on the host.
        window_bytes: storages that are copied at once.
        forwards: number of microbatches in flight, saved one after the other.
        pinned: buffers are of pinned memory, which are powers of two.
    """
    stays = out = held = window = 0
    moved: list[int] = []
    for size in [*storages] * forwards:
        buffer = 1 << (size - 1).bit_length() if pinned and size else size
        if size < max(min_bytes, 1) or held + buffer > host_bytes:
            stays += size
            continue
        held += buffer
        out += size
        moved.append(size)
    for size in reversed(moved):
        if window + size > window_bytes:
            break
        window += size
    left = out - window
    return OffloadBytes(out, left, held, stays, window, stays + window + min(left, window_bytes))
