"""Collectives of this rank, as torch's flight recorder has them (gloo and NCCL), and its stack."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from megacpp.home import HOME

BUFFER = "TORCH_FR_BUFFER_SIZE"  # of torch: how many collectives are remembered
ENTRIES = "2000"
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # CPU groups; groups of GPUs
ROOMS = ("train.py", "megacpp/", "parallel/", "optim/", "checkpointing/")
P2P = ("_wait_batch_p2p", "send", "recv")  # functions of torch that wait for another stage


def under_way() -> tuple[int, bool]:
    """Return the number of collectives that were begun, and whether one isn't complete."""
    begun, waiting = 0, False
    for dump in _dumps(entries=False):
        for group in dump.get("pg_status", {}).values():
            enqueued = int(group["last_enqueued_collective"])
            begun += enqueued
            waiting |= enqueued > int(group["last_completed_collective"])
    return begun, waiting


def waits() -> list[dict[str, Any]]:
    """Return the oldest incomplete collective of each group: op, group, members, number."""
    groups, found = _groups(), {}
    for dump in _dumps(entries=True):
        for entry in dump.get("entries", ()):
            name = entry["process_group"][0]
            if entry["retired"] or entry["is_p2p"] or name not in groups:
                continue
            group, op = groups[name], entry["profiling_name"]
            one = {"op": op.rpartition(":")[2], "seq": entry["collective_seq_id"], **group}
            if one["seq"] <= found.get(group["key"], one)["seq"]:
                found[group["key"]] = one
    return list(found.values())


def reached() -> dict[str, int]:
    """Return the number of collectives that this rank has begun, by group."""
    found: dict[str, int] = {}
    for group, about in _by_group():
        with suppress(RuntimeError):
            number: Any = group._get_sequence_number_for_group  # type: ignore[attr-defined]
            found[about["key"]] = number()
    return found


def stack() -> tuple[str, str]:
    """Return the main thread's innermost line of this project, and its whole Python stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", ""
    frames = traceback.extract_stack(frame)
    rooms = tuple(str(HOME / room) for room in ROOMS)
    own = [f for f in frames if os.path.abspath(f.filename).startswith(rooms)]
    last = (own or list(frames))[-1]
    path = os.path.relpath(os.path.abspath(last.filename), HOME) if own else last.filename
    return f"{path}:{last.lineno} {last.name}", "".join(traceback.format_list(frames))


def stage_wait(text: str) -> list[dict[str, Any]]:
    """Return a wait for other pipeline stages, which the flight recorder of gloo leaves out.

    Args:
        text: stack of the main thread.
    """
    *_, last = [line for line in text.splitlines() if line.startswith("  File ")] or [""]
    if not last.endswith(tuple(f" in {name}" for name in P2P)) or "distributed" not in last:
        return []
    groups = [about for _, about in _by_group()]  # all ranks first; along pp, unless that is all
    stages = [about for about in groups if about["group"] == "pp" and len(about["members"]) > 1]
    return [{"op": "send or receive", "seq": -1, **about} for about in (stages or groups)[:1]]


def _dumps(entries: bool) -> list[dict[str, Any]]:
    import torch._C._distributed_c10d as c10d

    found = [getattr(c10d, name) for name in DUMPS if hasattr(c10d, name)]
    return [json.loads(dump(entries, False)) for dump in found]


def _by_group() -> list[tuple[dist.ProcessGroup, dict[str, Any]]]:
    """Return the groups that this rank belongs to; a key is equal on the ranks of one group."""
    if not dist.is_initialized():
        return []
    world, found = dist.distributed_c10d._world, []
    for group, ranks in list(world.pg_group_ranks.items()):
        if group not in world.pg_names:
            continue
        members, name = sorted(ranks), world.pg_names[group]
        label = group.group_desc.removeprefix("mesh_")
        label = "world" if label in ("default_pg", "undefined") else label
        about = {"key": f"{name} {members}", "group": label, "members": members}
        found.append((group, about))
    return found


def _groups() -> dict[str, dict[str, Any]]:
    """Return this rank's groups by the name that the flight recorder has for them."""
    return {about["key"].partition(" ")[0]: about for _, about in _by_group()}
