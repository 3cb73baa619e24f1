"""Command `megacpp replay`: recorded steps once more from a checkpoint, compared bit for bit."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.config.arguments import parse_run
from megacpp.config.environment import MOST_RANKS
from megacpp.config.mix import corpus_folders
from megacpp.config.schema import DataConfig
from megacpp.config.settings import setting
from megacpp.errors import MegacppError, config_error
from megacpp.launch.command import command_words
from megacpp.report.files import read_launch
from megacpp.state.files import flat, rows_by_step
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
        -1,
        "Steps of the checkpoint to start from (-1: the newest with a step after it).",
        "steps",
        at_least=-1,
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
    starts, known = _starts(folder), rows_by_step(folder / "metrics.jsonl")
    made_steps = max((step for step in known), default=-1) + 1
    checkpoint = _checkpoint(folder, args.from_, made_steps)
    first = step_of(checkpoint)
    launch, most = _start_of(starts, first, made_steps)
    count = min(args.steps or most, most)
    ranks = args.nproc or int(launch["world_size"])
    with tempfile.TemporaryDirectory(prefix="megacpp-replay-") as name:
        again = Path(name) / "run"
        again.mkdir()
        if (folder / "rewinds.jsonl").exists():  # rows that were skipped are skipped again
            shutil.copy(folder / "rewinds.jsonl", again)
        data, place = _corpora(launch, words)
        own = data | {"run.dir": again, "run.until": first + count, "checkpoint.resume": checkpoint}
        saved = flat(launch["config"])
        flags = command_words(saved["preset"], saved | KEPT_APART | own)
        same = parse_run([*flags, *words], ranks).config
        _run([*flags, *words], ranks, place)
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
        if first + most < made_steps and not args.steps:
            print(
                f"from step {first + most + 1} on the run was started anew: --from {first + most}"
            )
    return int(bool(wrong))


def _starts(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all starts of a run, in the order of time."""
    found = [read_launch(path) for path in folder.glob("launch*.json")]
    if not any(found):
        rule = "has no launch.json" if folder.is_dir() else "no such run folder"
        raise config_error("run", folder, rule, "give the folder of a run")
    return sorted((one for one in found if one), key=lambda one: one.get("started", ""))


def _start_of(starts: list[dict[str, Any]], step: int, end: int) -> tuple[dict[str, Any], int]:
    """Return the start that made the step after `step`, and the number of steps that it made.

    Args:
        starts: in the order of time; a later one made all steps from its first one on.
        step: steps made before.
        end: steps that are recorded.
    """
    makers = [n for n, one in enumerate(starts) if one.get("first_step", 0) <= step]
    last = max(makers, default=0)
    later = [one.get("first_step", 0) for one in starts[last + 1 :]]
    return starts[last], min([end, *later]) - step


def _checkpoint(folder: Path, step: int, made: int) -> Path:
    """Return the checkpoint after `step` steps; -1: the newest with a step of `made` behind it."""
    there = sorted(map(step_of, published(folder / "checkpoints")))
    found = [path for path in published(folder / "checkpoints") if step_of(path) < made]
    if step >= 0:
        found = [path for path in found if step_of(path) == step]
    if not found:
        useful = ", ".join(str(n) for n in there if n < made)
        fix = f"use one of {useful}" if useful else "replay a run that saves (--checkpoint.every)"
        rule = (
            "no step after it is recorded" if step in there else f"{folder} has no such checkpoint"
        )
        raise config_error("from", step, rule, fix)
    return max(found, key=step_of).resolve()


def _corpora(launch: Mapping[str, Any], words: Sequence[str]) -> tuple[dict[str, str], Path]:
    """Return settings of a start's corpora from here, and the folder to replay in.

    Sources of a mixture are found from where the run was started.

    Raises:
        ConfigError: `data.path` is relative, and neither found here nor known from where it is.
    """
    data, below = launch["config"]["data"], Path(str(launch.get("folder") or ""))
    path, mixed = data["path"], DataConfig(data["path"], data.get("mix", ""))
    given = any(word.startswith("--data.") for word in words)
    if mixed.mix:
        there = corpus_folders(mixed, below)
        moved = not given and there != corpus_folders(mixed) and there[0].exists()
        return {}, below if moved else Path()
    path = str(below / path) if (below / path).exists() else path
    if not given and not Path(path).is_absolute() and not Path(path).exists():
        rule = "no such folder here; it is relative to where the run was started"
        raise config_error("data.path", path, rule, "replay from there, or add --data.path FOLDER")
    return {"data.path": path}, Path()


def _run(flags: list[str], ranks: int, folder: Path) -> None:
    """Run train.py in a folder, with its output in a file; its error is ours."""
    words = ["--nproc", str(ranks)]
    command = [sys.executable, "-m", "megacpp", "train", *words, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        error = MegacppError((said or ["the replay failed"])[0].removeprefix("error: "))
        error.exit_code = done.returncode
        raise error


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
