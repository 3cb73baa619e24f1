"""Contents of a run folder as plain data; missing parts are named, never guessed.

No torch import: the report of a run doesn't need what the run needed.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from megacpp.config.arguments import replace_keys
from megacpp.config.checks.every import resolve
from megacpp.config.schema import Config
from megacpp.errors import DataError, MegacppError
from megacpp.memory.budget import as_run
from megacpp.memory.components import COMPONENTS
from megacpp.memory.estimate import NO_TENSOR
from megacpp.memory.snapshot import Snapshot, compare, snapshots_of
from megacpp.memory.traffic import traffic
from megacpp.report.files import (
    EVALUATION,
    LAUNCH,
    STEP,
    STEPS,
    read_launch,
    read_object,
    read_rows,
    run_folder,
)
from megacpp.run.goodput import FILE, account, read_starts
from megacpp.run.predicted import TEN, verdict
from megacpp.speed.against import usual_steps
from megacpp.state.files import flat

NORM_RATIO, SIGMAS = 10.0, 6.0  # as megacpp/run/health.py warns
EVENTS = 200  # most skipped steps and warnings that are listed
SAMPLES = 3  # newest texts
PLAIN = ("loss", "bits_per_byte", "tokens_per_s", "step_s", "grad_norm", "lr", "mfu", "peak_bytes")


def gather(folder: Path) -> dict[str, Any]:
    """Return a run's records as plain data, by section; `missing` has a line for each absent one.

    Raises:
        ConfigError: the folder isn't a run's.
        DataError: a record is damaged; the error names file and line.
    """
    run_folder(folder)
    try:
        return _gathered(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise DataError(
            f"run={folder}: its records don't fit together ({what}). "
            "Fix: report it with the version of megacpp that made the run."
        ) from error


def _gathered(folder: Path) -> dict[str, Any]:
    launches = _launches(folder)
    steps = read_rows(folder / STEPS, STEP)
    missing: list[str] = []

    def have(name: str, found: Any, why: str) -> Any:
        if not found:
            missing.append(f"{name}: {why}")
        return found

    last = launches[-1] if launches else {}
    first = last.get("first_step", 0)  # before it another mesh may have run
    taken = [s for s in snapshots_of(folder / "memory") if s.step > first]
    have("launch record", launches, f"{LAUNCH} is not there")
    have("steps", steps, f"{STEPS} is " + ("empty" if (folder / STEPS).exists() else "not there"))
    starts = read_starts(folder / FILE)
    have("goodput", starts, f"{FILE} is not there: the run is older than it, or never started")
    have("snapshots", taken, "none was taken (memory.snapshot_every)")
    return {
        "folder": str(folder),
        "header": _header(last),
        "steps": _columns(steps),
        "groups": _groups(steps),
        "totals": _totals(steps, last),
        "evaluations": read_rows(folder / "evaluations.jsonl", EVALUATION),
        "samples": _samples(folder),
        "settings": flat(last.get("config") or {}),
        "memory": _memory(folder, last, taken, have),
        "traffic": _traffic(last, have),
        "speed": _speed(last, steps),
        "goodput": account(starts).as_dict() if starts else None,
        "growth": _growth(folder, taken),
        "attempts": last.get("attempts") or [],
        "events": _events(folder, launches, steps, taken),
        "missing": missing,
    }


def _header(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the launch, without what other sections show."""
    config = launch.get("config") or {}
    count = launch.get("parameters") or {}
    batch = {**(config.get("train") or {}), **(config.get("data") or {})}
    names = ("device_batch_size", "grad_accum", "tokens_per_step", "seq_len")
    return {
        "preset": config.get("preset"),
        "started": launch.get("started"),
        "git_commit": launch.get("git_commit"),
        "config_hash": launch.get("config_hash"),
        "command": launch.get("command"),
        "device": launch.get("device"),
        "world_size": launch.get("world_size"),
        "mesh": launch.get("mesh") or {},
        "versions": {**(launch.get("versions") or {}), "python": launch.get("python")},
        "parameters": {name: count[name] for name in ("total", "active") if name in count},
        "policy": launch.get("policy") or config.get("recompute") or {},
        "batch": {name: batch[name] for name in names if name in batch},
        "precision": (config.get("precision") or {}).get("dtype"),
        "optimizer": (config.get("optim") or {}).get("name"),
        "pattern": (config.get("model") or {}).get("pattern"),
        "depth": (config.get("model") or {}).get("depth"),
    }


def _columns(steps: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the figures of steps by name, in the order of steps."""
    names = [name for name in ("step", *PLAIN) if any(row.get(name) is not None for row in steps)]
    found = {name: [row.get(name) for row in steps] for name in names}
    if steps:
        found["tokens_read"] = list(accumulate(row.get("tokens") or 0 for row in steps))
    return found


def _groups(steps: list[dict[str, Any]]) -> dict[str, dict[str, list[list[float]]]]:
    """Return figures with several lines: [step from 1, value] by the name of the line."""
    rates, load, sources, tasks = (dict[str, list[list[float]]]() for _ in range(4))
    for row in steps:
        at = row["step"] + 1
        for name, rate in (row.get("lr_groups") or {}).items():
            rates.setdefault(name, []).append([at, rate])
        for name, loss in (row.get("loss_by_source") or {}).items():
            sources.setdefault(name, []).append([at, loss])
        for name, loss in (row.get("val_loss") or {}).items():
            sources.setdefault(f"{name}, held out", []).append([at, loss])
        for name, value in (row.get("tasks") or {}).items():
            tasks.setdefault(name, []).append([at, value])
        if busy := list((row.get("load_max_over_mean") or {}).values()):
            load.setdefault("most loaded layer", []).append([at, max(busy)])
            load.setdefault("mean of layers", []).append([at, sum(busy) / len(busy)])
    return {"rates": rates, "load": load, "sources": sources, "tasks": tasks}


def _samples(folder: Path) -> list[dict[str, str]]:
    """Return the newest generated texts, oldest first."""
    paths = sorted((folder / "samples").glob("*.txt"))[-SAMPLES:]
    return [{"name": p.stem, "text": p.read_text(errors="replace")} for p in paths]


def _totals(steps: list[dict[str, Any]], launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures of all steps; the first step of a start doesn't count for speed."""
    if not steps:
        return {}
    first = launch.get("first_step", 0)
    timed = [row for row in steps if row["step"] > first] or steps
    speeds = sorted(row["tokens_per_s"] for row in timed if row.get("tokens_per_s") is not None)
    healthy = [row for row in steps if not row.get("skipped")]
    return {
        "steps": steps[-1]["step"] + 1,
        "of": ((launch.get("config") or {}).get("run") or {}).get("steps"),
        "tokens": sum(row.get("tokens") or 0 for row in steps),
        "skipped": len(steps) - len(healthy),
        "last_loss": healthy[-1].get("loss") if healthy else None,
        "median_tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "peak_bytes": max(row.get("peak_bytes") or 0 for row in steps),
    }


def _speed(launch: Mapping[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return predicted and measured seconds of a step, with what the first ten said; or None."""
    ahead = launch.get("speed")
    if not ahead:
        return None
    first = launch.get("first_step", 0)
    times = [row["step_s"] for row in steps if row["step"] >= first and row.get("step_s")]
    return {
        "predicted": ahead,
        "measured_s": statistics.median(usual_steps(times)) if times else None,
        "verdict": verdict(ahead, times[:TEN]) if len(times) >= TEN else None,
    }


# ---- memory and communication -------------------------------------------------------------------


def _memory(
    folder: Path,
    launch: Mapping[str, Any],
    taken: list[Snapshot],
    have: Callable[[str, Any, str], Any],
) -> dict[str, Any]:
    """Return predicted and measured bytes by component, with their origin."""
    found = launch.get("memory") or {}
    estimate = found.get("estimate") or {}
    have("estimate", estimate, "launch.json has no memory.estimate: launched without the gate")
    record = _measured(folder, launch)
    rank, first = found.get("rank", 0), launch.get("first_step", 0)
    fullest = [s for s in snapshots_of(folder / "memory", rank) if s.step > first] if rank else []
    followed = next((s for s in [*fullest, *taken] if s.followed), None)
    measured, source = {}, ""
    if record:
        parts = {name: record["components"].get(name) or {} for name in COMPONENTS}
        measured = {k: v["measured"] for k, v in parts.items() if v.get("measured") is not None}
        source = f"the allocations of step {record['step']}, rank {record['rank']}"
    elif followed is not None:
        measured = followed.at_peak
        source = f"the allocations of step {followed.step}, rank {followed.rank}"
    have("measured memory", measured, "no step was followed (compiled, or no memory.calibration)")
    return {
        "predicted": estimate.get("components") or {},
        "predicted_bytes": estimate.get("point"),
        "predicted_tensors": sum(
            size
            for name, size in (estimate.get("components") or {}).items()
            if name not in NO_TENSOR
        ),
        "upper_bytes": estimate.get("upper"),
        "moment": estimate.get("moment"),
        "verdict": estimate.get("verdict"),
        "budget_bytes": found.get("budget"),
        "gate": found.get("gate"),
        "rank": rank,
        "measured": measured,
        "measured_bytes": sum(measured.values()),
        "measured_from": source,
        "calibration": {
            name: record[name] for name in ("predicted_bytes", "measured_bytes", "measures")
        }
        if record
        else {},
        "peaks": read_object(folder / "memory" / "summary.json"),
    }


def _measured(folder: Path, launch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurements of the last start's first step."""
    key = ((launch.get("memory") or {}).get("calibration") or {}).get("key")
    record = read_object(folder / "memory" / "measured.json")
    return record if key and record.get("key") == key else {}


def _traffic(launch: Mapping[str, Any], have: Callable[[str, Any, str], Any]) -> dict[str, Any]:
    """Return the first rank's bytes per step, by axis and kind of data."""
    if launch.get("traffic"):
        return launch["traffic"]
    size = launch.get("world_size", 1)
    if not launch or size < 2:
        have("communication", None, "one rank sends nothing" if launch else "no launch record")
        return {}
    try:
        on_cpu = launch.get("device", "cpu") == "cpu"
        config = resolve(replace_keys(Config(), flat(launch["config"])), size)
        config = as_run(config, "cpu" if on_cpu else "cuda", narrow=not on_cpu)
    except (MegacppError, KeyError, TypeError, ValueError) as error:
        have("communication", None, f"the recorded configuration is not of this version ({error})")
        return {}
    return traffic(config, size).as_dict()


def _growth(folder: Path, taken: list[Snapshot]) -> dict[str, Any]:
    """Return the growth between the first and the last recorded step; `record` covers all ranks."""
    record = read_object(folder / "memory" / "summary.json").get("largest_growth")
    followed = [s for s in taken if s.followed]
    found: dict[str, Any] = {"record": record, "peaks": [[s.step, s.peak_bytes] for s in followed]}
    if len(followed) > 1:
        found["difference"] = compare(followed[0], followed[-1]).as_dict()
    return found


# ---- events -------------------------------------------------------------------------------------


def _events(
    folder: Path, launches: list[dict[str, Any]], steps: list[dict[str, Any]], taken: list[Snapshot]
) -> list[dict[str, Any]]:
    """Return events in the order of steps; those without a step come last."""
    found = []
    for launch in launches:
        first, when = launch.get("first_step", 0), launch.get("started", "")
        words = f"resumed {when}" if first else f"started {when}"
        found.append(_event(first, "restart" if first else "start", words))
    strange = [event for row in steps for event in _of_step(row)]
    found += strange[:EVENTS]
    if len(strange) > EVENTS:
        found.append(_event(None, "more", f"{len(strange) - EVENTS} further steps like these"))
    before = None
    for one in (s for s in taken if s.followed):
        if before is not None and (change := compare(before, one)).loud:
            grown = f"{change.largest.bucket} by {change.largest.grown:,} bytes"
            found.append(_event(one.step, "growth", f"{grown}: {change.cause.words}"))
        before = one
    for path in sorted((folder / "failures").glob("*.txt")):
        found.append(_event(None, "oom" if "oom" in path.name else "failure", _failure(path)))
    for attempt in (launches[-1].get("attempts") if launches else None) or []:
        words = f"{attempt.get('outcome')}: {attempt.get('detail') or attempt.get('changed')}"
        found.append(_event(None, "attempt", f"{attempt.get('attempt')}: {words}"))
    return sorted(found, key=lambda e: (e["step"] is None, e["step"] or 0))


def _of_step(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    step, said = row["step"] + 1, []
    if row.get("skipped"):
        said.append(_event(step, "skipped", f"left out, {row.get('nonfinite', 0)} not finite"))
    elif row.get("nonfinite"):
        said.append(_event(step, "sanitised", f"{row['nonfinite']} values taken as zero"))
    if (row.get("grad_norm_ratio") or 0) >= NORM_RATIO:
        said.append(
            _event(step, "warning", f"gradient norm {row['grad_norm_ratio']:.1f} times its average")
        )
    if (row.get("loss_sigma") or 0) >= SIGMAS:
        said.append(_event(step, "warning", f"loss {row['loss_sigma']:.1f} sigma above its mean"))
    return said


def _event(step: int | None, kind: str, words: str) -> dict[str, Any]:
    return {"step": step, "kind": kind, "words": words}


def _failure(path: Path) -> str:
    """Return the line of a failure's file that names the error."""
    rows = [row for row in path.read_text(errors="replace").splitlines() if row.strip()]
    said = rows[1] if path.name.startswith("oom") and len(rows) > 1 else rows[-1] if rows else ""
    return f"{path.name}: {said.strip()[:300]}"


# ---- files --------------------------------------------------------------------------------------


def _launches(folder: Path) -> list[dict[str, Any]]:
    """Return launch.json and the records of later starts, by their first step."""
    found = [read_launch(folder / LAUNCH)]
    paths = (p for p in folder.glob("launch-*.json") if re.fullmatch(r"launch-\d+", p.stem))
    found += [read_launch(path) for path in sorted(paths)]
    return [launch for launch in found if launch]
