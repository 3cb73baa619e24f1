"""Command `megacpp replay`: recorded steps once more from a checkpoint, compared bit for bit."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.config.arguments import flatten, parse_run
from megacpp.config.environment import MOST_RANKS
from megacpp.config.presets import preset
from megacpp.config.settings import setting
from megacpp.config.values import flag_text
from megacpp.errors import CheckpointError, MegacppError, config_error
from megacpp.report.files import flat, read_launch
from megacpp.state.files import rows_by_step
from megacpp.state.published import published, step_of

COMPARED = ("loss", "grad_norm")
OTHER_MESH = {"fp64": 1e-10, "fp32": 1e-4}  # relative; a sum in another order
NARROW = 2e-2  # likewise, in bf16 and fp16
KEPT_APART = {  # settings of the replay alone
    "run.tensorboard": False,
    "run.wandb": "",
    "run.profile": "",
    "run.log_every": 1,
    "run.eval_every": 0,
    "run.tasks": "",
    "run.tasks_every": 0,
    "memory.calibration": "",
    "memory.snapshot_every": 0,
    "memory.fit": "off",
    "checkpoint.init": "",
}


@dataclass(frozen=True)
class ReplayArgs:
    """Steps to make once more."""

    run: str = setting(words="Folder of the run.", positional=True)
    from_: int = setting(
        -1, "Steps of the checkpoint to start from (-1: the newest one).", "steps", at_least=-1
    )
    steps: int = setting(0, "Steps to make (0: as many as are recorded).", "steps", at_least=0)
    nproc: int = setting(0, "Ranks (0: as many as the run had).", "ranks", at_most=MOST_RANKS)
    json: bool = setting(False, "Print one JSON object.")


def replay(args: ReplayArgs, words: list[str]) -> int:
    """Make recorded steps again from a checkpoint, and compare them with the record.

    Loss, gradient norm and digests must be equal bit for bit on the same mesh. Settings after RUN
    such as --mesh.tp 2 replay it on another mesh, where sums have another order: loss and norm must
    then be equal to 1e-10 in fp64, 1e-4 in fp32 and 2e-2 in narrower types. Nothing of the run is
    changed. The exit code is 1 if a step differs: a device computed wrongly, then or now.
    """
    from megacpp.state.digests import recorded  # imports torch

    folder = Path(args.run)
    config, launch = _read(folder / "config.json"), read_launch(folder / "launch.json")
    if not launch:
        raise CheckpointError(f"{folder}: no launch.json. Fix: give the folder of a run.")
    checkpoint = _checkpoint(folder, args.from_)
    first, known = step_of(checkpoint), rows_by_step(folder / "metrics.jsonl")
    most = max((step for step in known), default=-1) + 1 - first
    count = min(args.steps or most, most)
    if count < 1:
        fix = f"use an earlier checkpoint: {', '.join(_steps(folder)) or 'none is there'}"
        raise config_error("from", first, "no step after it is recorded", fix)
    ranks = args.nproc or int(launch["world_size"])
    with tempfile.TemporaryDirectory(prefix="megacpp-replay-") as name:
        again = Path(name) / "run"
        again.mkdir()
        if (folder / "rewinds.jsonl").exists():  # rows that were skipped are skipped again
            shutil.copy(folder / "rewinds.jsonl", again)
        own = {"run.dir": again, "run.until": first + count, "checkpoint.resume": checkpoint}
        flags = _flags(config["config"], {**KEPT_APART, **own})
        same = parse_run([*flags, *words], ranks).config
        _run([*flags, *words], ranks)
        made, digests = rows_by_step(again / "metrics.jsonl"), recorded(again)
    alike = all(getattr(same.mesh, axis) == n for axis, n in launch["mesh"].items())
    alike &= ranks == launch["world_size"]
    limit = 0.0 if alike else OTHER_MESH.get(same.precision.dtype, NARROW)
    before = recorded(folder) if alike else {}
    rows = [
        _compared(
            step, known.get(step, {}), made.get(step, {}), before.get(step), digests.get(step)
        )
        for step in range(first, first + count)
    ]
    wrong = [row for row in rows if not _holds(row, limit)]
    result = {"from": first, "steps": count, "ranks": ranks, "limit": limit, "compared": rows}
    if args.json:
        print(json.dumps(result | {"differing": [row["step"] for row in wrong]}))
    else:
        for row in wrong:
            print(_line(row))
        seen = sum("digest" in row for row in rows)
        how = "bit for bit" if alike else f"to {limit:g} (another mesh)"
        print(
            f"{count - len(wrong)} of {count} steps from {folder}/checkpoints/{checkpoint.name} "
            f"are equal {how}: loss, gradient norm, {seen} digests"
        )
    return int(bool(wrong))


def _checkpoint(folder: Path, step: int) -> Path:
    found = published(folder / "checkpoints")
    if step >= 0:
        found = [path for path in found if step_of(path) == step]
    if not found:
        there = ", ".join(_steps(folder))
        fix = f"use one of {there}" if there else "replay a run that saves (--checkpoint.every)"
        raise config_error("from", step, f"{folder} has no such checkpoint", fix)
    return max(found, key=step_of).resolve()


def _steps(folder: Path) -> list[str]:
    return [str(step_of(path)) for path in sorted(published(folder / "checkpoints"), key=step_of)]


def _flags(config: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the command line of a saved configuration with the replay's settings."""
    base = flatten(preset(config["preset"]))
    saved = {k: tuple(v) if isinstance(v, list) else v for k, v in flat(config).items()}
    given = {k: v for k, v in saved.items() if k in base and base[k] != v} | dict(own)
    return [
        config["preset"],
        *(f"--{key.replace('_', '-')}={flag_text(value)}" for key, value in given.items()),
    ]


def _run(flags: list[str], ranks: int) -> None:
    """Run train.py with its output in a file; its error is ours."""
    words = ["--nproc", str(ranks)]
    command = [sys.executable, "-m", "megacpp", "train", *words, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        error = MegacppError((said or ["the replay failed"])[0].removeprefix("error: "))
        error.exit_code = done.returncode
        raise error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}. Fix: give the folder of a run.") from None
    return found


def _compared(
    step: int, was: Mapping[str, Any], now: Mapping[str, Any], then: str | None, again: str | None
) -> dict[str, Any]:
    """Return recorded and repeated values of one step."""
    row: dict[str, Any] = {"step": step}
    row |= {key: [was.get(key), now.get(key)] for key in COMPARED}
    return row | ({"digest": [then, again]} if then and again else {})


def _holds(row: Mapping[str, Any], limit: float) -> bool:
    was, now = zip(*(row[key] for key in COMPARED), strict=True)
    alike = all(
        one == two or (None not in (one, two) and math.isclose(one, two, rel_tol=limit))
        for one, two in zip(was, now, strict=True)
    )
    return alike and len(set(row.get("digest", ()))) <= 1


def _line(row: Mapping[str, Any]) -> str:
    differ = [
        f"{key} was {row[key][0]}, is {row[key][1]}"
        for key in (*COMPARED, "digest")
        if key in row and row[key][0] != row[key][1]
    ]
    return f"step {row['step'] + 1} differs: {', '.join(differ)}"
