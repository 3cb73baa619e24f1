"""Published checkpoints of a run: find, order and read them; no torch import here.

    checkpoints/latest          `step-000100 DIGEST`: name of the newest checkpoint, and its digest
    checkpoints/step-000100/    manifest.json and the files that it names (checkpoint.py)

The digest keeps a flipped bit of a name from selecting another checkpoint. Nothing here hashes
tensors: checkpoint.py does, before it reads or counts one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacpp.errors import CheckpointError
from megacpp.state.files import ASIDE
from megacpp.state.manifest import (
    NAME,
    UNREADABLE,
    DamagedError,
    Manifest,
    read_json,
    read_manifest,
    whole_number,
)

EXTRA, LATEST = "extra.json", "latest"
STEP = re.compile(rf"step-(\d{{1,18}})(?:{re.escape(ASIDE)})?", re.ASCII)
COUNTERS = ("step", "steps", "updates", "bad_steps", "rows", "tokens_per_step")


def latest_text(name: str) -> str:
    """Return the content of `latest` for a checkpoint's name."""
    return f"{name} {_digest(name)}\n"


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that was saved last, or None."""
    return next(iter(candidates(folder)), None)


def candidates(folder: Path) -> list[Path]:
    """Return published checkpoints: the one that `latest` names, older ones, then later ones.

    Later steps than `latest` belong to a course of the run that was given up.
    """
    return in_order(published(folder), _named(folder))


def in_order(found: list[Path], named: Path | None) -> list[Path]:
    """Return checkpoints in the order in which a run would take them, as `candidates` has them."""
    top = step_of(named) if named is not None and named in found else None

    def order(path: Path) -> tuple[bool, bool, int, bool]:
        step = step_of(path)
        return top is not None and path == named, top is None or step <= top, step, not path.suffix

    return sorted(found, key=order, reverse=True)


def published(folder: Path) -> list[Path]:
    """Return finished checkpoints, latest step first; other files in the folder are ignored."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if STEP.fullmatch(p.name) and (p / NAME).is_file()]
    return sorted(found, key=lambda path: (step_of(path), not path.suffix), reverse=True)


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    match = STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def overtaken(run: Path) -> str:
    """Return a note if a run went on after its final weights; empty: they are its newest.

    Damaged weights are no concern of it: who reads them says so.

    Args:
        run: folder of the run.
    """
    newest = latest_checkpoint(run / "checkpoints")
    if newest is None or not (run / "final" / NAME).is_file():
        return ""
    try:
        final, last = read_manifest(run / "final", "export").step, step_of(newest)
    except DamagedError:
        return ""
    if not 0 < final < last:  # 0: exported without a number
        return ""
    return f"note: {run}/final has the weights of step {final}; --checkpoint latest has step {last}"


def passed_over(folder: Path, path: Path | None) -> list[str]:
    """Return a line for everything later than `path`, the checkpoint that a run goes on from.

    Checkpoints are published whole, so a folder without a manifest lost it afterwards.
    """
    if not folder.is_dir():
        return []
    after, lines = step_of(path) if path else -1, []
    for later in sorted(p for p in folder.iterdir() if STEP.fullmatch(p.name)):
        if step_of(later) > after and not (later / NAME).is_file():
            lines.append(f"{later} is passed over: it has no {NAME}")
        elif step_of(later) > after and not later.suffix:
            lines.append(f"{later} is passed over: {LATEST} names {path.name if path else 'none'}")
    named = _named(folder)
    if path and (folder / LATEST).exists() and (named is None or not named.exists()):
        what = "is damaged" if named is None else f"names {named.name}, which is gone"
        lines.append(f"{folder / LATEST} {what}: {path} has the latest step")
    return lines


def read_extra(path: Path) -> dict[str, Any]:
    """Return the `extra` of a checkpoint; manifest and file are verified first, tensors are not.

    Raises:
        CheckpointError: there is no such checkpoint, or the file is damaged.
    """
    try:
        return checked_extra(path, read_manifest(path, "checkpoint"))["extra"]
    except DamagedError as damage:
        raise CheckpointError(f"{damage}. Fix: {advice(path)}.") from None


def in_streak(extra: Mapping[str, Any]) -> bool:
    """Return whether bad steps led to a checkpoint, or spikes that may yet rewind the run."""
    spikes = extra.get("others", {}).get("health", {}).get("spikes", 0)
    most = extra.get("config", {}).get("train", {}).get("max_spikes", 0)
    return bool(extra.get("bad_steps")) or 0 < spikes < most


def checked_extra(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return extra.json of a checkpoint: `extra`, and the generators' states of every rank.

    Raises:
        DamagedError: a counter is out of range, or the file is damaged.
    """
    state = read_json(path, EXTRA, manifest)
    try:
        extra = state["extra"]
        for key in COUNTERS:
            whole_number(extra.get(key, 0))
        if extra.get("step", manifest.step) != manifest.step:
            raise ValueError(f"step {extra['step']} is not step {manifest.step} of {NAME}")
        for key, kind in (("config", dict), ("others", dict), ("data_fingerprint", str)):
            if not isinstance(extra.get(key, kind()), kind):
                raise ValueError(f"{key} is of another type")
        if len(state["rng"]) != manifest.world_size:
            raise ValueError("not every rank has a generator")
    except UNREADABLE as error:
        raise DamagedError(f"{path / EXTRA}: can't be of a run ({error})") from None
    return state


def advice(path: Path) -> str:
    """Return the fix for an unloadable checkpoint: one in it, the next newest, or to start anew."""
    for folder in (path, path / "checkpoints"):
        if inside := latest_checkpoint(folder):
            return f"use --checkpoint.resume {inside}"
    others = [p for p in published(path.parent) if p.name != path.name]
    if others:
        return f"use another checkpoint: --checkpoint.resume {others[0]}"
    return "start anew: --checkpoint.resume never"


def _named(folder: Path) -> Path | None:
    """Return the path that `latest` names; None: there is no such file, or it is damaged."""
    path = folder / LATEST
    try:
        if not path.is_file() or path.stat().st_size > 100:
            return None
        name = name_in(path.read_text())
    except (OSError, ValueError):
        return None
    return folder / name if name else None


def name_in(text: str) -> str:
    """Return the name that the text of `latest` has; empty: it is damaged."""
    name, *digest = text.split() or [""]
    sound = STEP.fullmatch(name) and digest in ([], [_digest(name)])  # once without a digest
    return name if sound else ""


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
