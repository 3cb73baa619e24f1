"""Write a step's allocations as a file that PyTorch's memory viewer opens.

    write_snapshot(trace_step(config, size), "step.pickle")
    # drop it on https://pytorch.org/memory_viz, or python -m torch.cuda._memory_viz stats FILE

The file has the format of `torch.cuda.memory._dump_snapshot`, filled by a replay: allocations in
their order, their addresses in segments, and the state at the end. In place of a call stack an
allocation has its component, part and operator; the component is its color, too.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from megacpp.memory.allocator import drive
from megacpp.memory.caching import Action, CachingAllocator, Chunk
from megacpp.memory.stream import Stream, StreamBlock

PROTOCOL = 4  # of pickle: the newest that the viewer reads
Entry = dict[str, Any]
Frames = list[dict[str, str | int]]


def write_snapshot(
    stream: Stream, path: str | Path, expandable: bool = False, until: int | None = None
) -> None:
    """Write a snapshot as a pickle.

    Args:
        stream: allocations and frees of a step.
        path: file to write.
        expandable: as with `expandable_segments:True`.
        until: event after which the snapshot is taken; None: the last.
    """
    Path(path).write_bytes(pickle.dumps(snapshot(stream, expandable, until), PROTOCOL))


def snapshot(stream: Stream, expandable: bool = False, until: int | None = None) -> dict[str, Any]:
    """Return the content of a snapshot: `segments` at the end, and `device_traces` of one device.

    Sizes of allocations are those that tensors request, sizes of blocks those that they got.
    `time_us` is the number of the event.
    """
    new: list[tuple[Action, int, int, int]] = []
    allocator = CachingAllocator(expandable, listener=lambda *change: new.append(change))
    trace: list[Entry] = []
    held: dict[int, StreamBlock] = {}
    for event, block, chunk in drive(stream, allocator):
        frames = _frames(block)
        for change in new:
            trace += _entries(change, block, frames, event)
        new.clear()
        if chunk is not None and not chunk.free:
            held[chunk.address] = block
        if event == until:
            break
    return {
        "segments": _segments(allocator, held),
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": expandable},
    }


def _entries(
    change: tuple[Action, int, int, int], block: StreamBlock, frames: Frames, event: int
) -> list[Entry]:
    """Return entries of a GPU's trace for one change of the allocator."""
    action, address, size, stream = change
    of_tensor = action in ("alloc", "free")
    actions = ("free_requested", "free_completed") if action == "free" else (action,)
    return [
        {
            "action": name,
            "addr": address,
            "size": block.bytes if of_tensor else size,
            "stream": stream,
            "time_us": event,
            "frames": frames,
            # The viewer stops at a file with categories of which none is `unknown`.
            "category": block.component if of_tensor else "unknown",
        }
        for name in actions
    ]


def _segments(allocator: CachingAllocator, held: dict[int, StreamBlock]) -> list[Entry]:
    """Return contiguous ranges of reserved memory, and the blocks in them."""
    found: list[Entry] = []
    for chunk in allocator.chunks():
        last = found[-1] if found else None
        if last is None or last["address"] + last["total_size"] != chunk.address:
            found.append(last := _segment(allocator, chunk))
        last["total_size"] += chunk.bytes
        last["blocks"].append(_block(chunk, held.get(chunk.address)))
        for name in ("allocated_size", "active_size"):
            last[name] += 0 if chunk.free else chunk.bytes
        last["requested_size"] += last["blocks"][-1]["requested_size"]
    return found


def _segment(allocator: CachingAllocator, first: Chunk) -> Entry:
    return {
        "device": 0,
        "address": first.address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": first.pool.stream,
        "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": allocator.expandable,
        "frames": [],
        "blocks": [],
    }


def _block(chunk: Chunk, held: StreamBlock | None) -> Entry:
    block = None if chunk.free else held
    return {
        "address": chunk.address,
        "size": chunk.bytes,
        "requested_size": block.bytes if block is not None else 0,
        "state": "active_allocated" if block is not None else "inactive",
        "frames": _frames(block) if block is not None else [],
    }


def _frames(block: StreamBlock) -> Frames:
    """Return frames in place of a call stack, innermost first."""
    names = ("operator", block.name), ("part", block.part or "(none)"), ("of", block.component)
    return [{"filename": kind, "line": 0, "name": name} for kind, name in names]
