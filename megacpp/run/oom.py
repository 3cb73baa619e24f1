"""Report after memory ran out: predicted, live and grown bytes, and the cheapest fixes."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megacpp.kernels.chosen import as_chosen
from megacpp.memory.budget import as_run, fullest, resident_bytes, words
from megacpp.memory.components import COMPONENTS, RESTING
from megacpp.memory.fixes import cheapest_fixes
from megacpp.memory.snapshot import STEADY, Snapshot, compare
from megacpp.model.precision import compute_dtype
from megacpp.run.forensics import Forensics, allocator_state
from megacpp.state.files import read_parsed

# Messages of out-of-memory errors that have no exception class of their own.
NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
GAIN = 0.1  # fraction of the estimate that a fix should save


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in NO_MEMORY)


def oom_screen(error: BaseException, folder: Path, found: Forensics | None = None) -> str:
    """Return the report: the failed allocation, predicted, live and grown bytes, and fixes.

    Args:
        error: exception of the failed allocation.
        folder: folder of the run.
        found: forensics of the run; None looks for them on the exception's stack.
    """
    found = found or forensics_of(error)
    predicted = recorded_estimate(folder)
    device = found.device if found else torch.device("cpu")
    failed = found.at_error() if found else None
    live = failed.at_peak if failed else {}
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    state = allocator_state(device, 0)
    lines = ["out of memory", f"  {first[:200]}", "", *_table(predicted, live, device, state), ""]
    lines += _grown(found, failed)
    lines += ["", "what helps, cheapest first", *(f"  {fix}" for fix in _fixes(found))]
    return "\n".join(lines)


def forensics_of(error: BaseException) -> Forensics | None:
    """Return the run's forensics, found by its records on the exception's stack, or None."""
    from megacpp.run.records import Records

    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, Records):
                return value.forensics
            if isinstance(value, Forensics):
                return value
    return None


def recorded_estimate(folder: Path) -> dict[str, Any]:
    """Return `memory` of the newest launch record: estimate and verdict; empty without one."""
    later = sorted(folder.glob("launch-*.json"), reverse=True)
    for path in (*later, folder / "launch.json"):
        if isinstance(memory := read_parsed(path).get("memory"), dict):
            return memory
    return {}


def show_once(error: BaseException, folder: Path) -> Path:
    """Write the report to `failures/oom-rank-N.txt`; one rank of a machine prints it too."""
    path = folder / "failures" / f"oom-rank-{os.environ.get('RANK', '0')}.txt"
    try:
        screen = oom_screen(error, folder)
    except Exception as second:  # the first error must be reported
        screen = f"out of memory, and no more is known: {type(second).__name__}: {second}"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(screen + "\n")
    with contextlib.suppress(FileExistsError):
        if "WORLD_SIZE" in os.environ:  # ranks of a machine share a parent, a new one at each start
            (path.parent / f".shown-{os.getppid()}").touch(exist_ok=False)
        print(screen, file=sys.stderr, flush=True)
    return path


def _table(
    memory: Mapping[str, Any], live: Mapping[str, int], device: torch.device, state: dict[str, Any]
) -> list[str]:
    """Return predicted and live bytes, a line per component."""
    estimate = memory.get("estimate") or {}
    predicted: Mapping[str, int] = estimate.get("components") or {}
    known = sum(live.values())
    rows = {name: (predicted.get(name), live.get(name)) for name in COMPONENTS}
    lines = [f"  {'':24}{'predicted':>12}{'live':>12}"]
    for name, (was, now) in rows.items():
        if was or now:
            lines.append(f"  {name:24}{_cell(was):>12}{_cell(now):>12}")
    total = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    if total is not None and total > known:
        lines.append(f"  {'not told apart':24}{'':>12}{words(total - known):>12}")
    point = estimate.get("point")
    lines.append(f"  {'all':24}{_cell(point):>12}{_cell(total or known):>12}")
    if not estimate:
        lines.append("  nothing was predicted: launch.json has no memory.estimate")
    if not live:
        lines.append("  what is live is not known: it failed before there was a model")
    if state:
        free, whole = torch.cuda.mem_get_info(device)
        lines.append(
            f"  device {words(whole)}, free {words(free)}; allocator: reserved "
            f"{words(state['reserved_bytes'])}, in blocks partly used "
            f"{words(state['split_bytes'])}, {state['retries']} retries"
        )
    lines.append(f"  resident set of the process {words(resident_bytes())}")
    return lines


def _grown(found: Forensics | None, failed: Snapshot | None) -> list[str]:
    """Return the largest buckets, their growth since the last snapshot, and that before it."""
    if found is None or failed is None:
        return ["grown: not known, there was no snapshot yet (memory.snapshot_every)"]
    lines, (first, last) = [], (found.first, found.last)
    if failed.followed:
        moving = sorted(
            (x for x in failed.most.items() if x[0] not in RESTING), key=lambda x: -x[1]
        )
        said = ", ".join(f"{name} {words(size)}" for name, size in moving[:3])
        lines.append(f"largest in {failed.where or 'this step'}: {said}")
    if first is None or last is None:
        return [*lines, "grown: not known, there was no snapshot yet (memory.snapshot_every)"]
    if failed.followed:
        grown = {k: v - last.at_peak.get(k, 0) for k, v in failed.at_peak.items()}
        top = sorted((x for x in grown.items() if x[1] > 0), key=lambda x: -x[1])[:3]
        said = ", ".join(f"{name} {words(more)}" for name, more in top) or "no component is larger"
        lines.append(f"grown since the fullest moment of step {last.step}: {said}")
        lines.append(_between(last, failed, f"from step {last.step} to the error"))
    elif found.follows:
        lines.append(
            f"grown in step {failed.step}: not known, the step wasn't recorded "
            "(memory.snapshot_every=1 records all, which then take half as long again)"
        )
    else:
        lines.append(
            f"grown in step {failed.step}: not known, no step of this run can be recorded "
            "(train.compile, precision.fp8=te and kernels.attention=flex hide tensors)"
        )
        lines.append(_between(last, failed, f"from step {last.step} to the error"))
    if first is not last:
        lines.append(_between(first, last, f"from step {first.step} to {last.step}"))
    return lines


def _between(before: Snapshot, after: Snapshot, words_: str) -> str:
    """Return what grew between two snapshots, and why."""
    other = compare(before, after)
    row, cause = other.largest, other.cause
    if cause is STEADY:
        return f"grown {words_}: {STEADY.words}"
    return f"grown {words_}: {row.bucket} by {words(row.grown)}: {cause.words}. Fix: {cause.fix}."


def _fixes(found: Forensics | None) -> list[str]:
    """Return changes that save a tenth of the estimate, by the estimator's own figures."""
    if found is None:
        return ["--train.device-batch-size half as large: accumulation makes up for it"]
    size = int(os.environ.get("WORLD_SIZE", "1"))
    narrow = compute_dtype(found.config.precision, found.device) == torch.bfloat16
    config = as_run(as_chosen(found.config, found.device), found.device.type, narrow)
    needs = fullest(config, size)[1]
    less = int(needs.point * (1 - GAIN))
    fixes, _ = cheapest_fixes(config, size, lambda c: fullest(c, size, less)[1], needs)
    return list(map(str, fixes)) or [
        f"by the estimate, fullest in {needs.moment or 'a step'}, no setting would gain anything: "
        "more ranks on mesh.dp_shard, or a smaller model"
    ]


def _cell(n: float | None) -> str:
    return words(n) if n is not None else ""
