"""Records of a run folder; a damaged record is reported with its line, never skipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp.errors import DataError, config_error
from megacpp.launch.schema import current

LAUNCH, STEPS = "launch.json", "metrics.jsonl"
NUMBER = (int, float)
# Types of a step's values, if present; null is a non-finite number.
STEP: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "tokens": (int,),
    "valid_tokens": (int,),
    "grad_accum": (int,),
    "skipped": (bool,),
    "lr_groups": (dict,),
    "loss_by_source": (dict,),
    "val_loss": (dict,),
    "tasks": (dict,),
    "load_max_over_mean": (dict,),
    "load_entropy": (dict,),
    **dict.fromkeys(("loss", "bits_per_byte", "grad_norm", "lr", "mfu"), NUMBER),
    **dict.fromkeys(("tokens_per_s", "step_s", "peak_bytes", "nonfinite"), NUMBER),
    **dict.fromkeys(("grad_norm_ratio", "loss_sigma", "loss_scale"), NUMBER),
    **dict.fromkeys(("aux_gradient_ratio", "audit_s"), NUMBER),
}
EVALUATION: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "no_verdict": (str,),
    "val_loss": (dict,),
    **dict.fromkeys(("loss", "bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte"), NUMBER),
    "complete": NUMBER,
}
OBJECTS = ("config", "parameters", "mesh", "versions", "memory", "traffic", "policy")


def run_folder(folder: Path) -> Path:
    """Return the folder of a run.

    Raises:
        ConfigError: no such folder, or not a run's.
    """
    if not folder.is_dir():
        raise config_error("run", folder, "no such run folder", "give the folder of a run")
    if not _is_run(folder):
        rule = f"neither {LAUNCH} nor {STEPS} is there"
        raise config_error("run", folder, rule, "give the folder of a run (--run.dir)")
    return folder


def runs_among(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs among folders, as `runs/*` names others; say which are left out.

    Raises:
        ConfigError: a folder isn't there, or none is a run's.
    """
    kept = [folder for folder in folders if _is_run(folder) or not folder.is_dir()] or folders
    for folder in folders:
        if folder not in kept:
            print(f"note: {folder} is left out: it holds no run", file=sys.stderr)
    return [run_folder(folder) for folder in kept]


def _is_run(folder: Path) -> bool:
    return (folder / LAUNCH).exists() or (folder / STEPS).exists()


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file.

    Raises:
        DataError: it is damaged.
    """
    text = _text(path)
    if not text and not path.exists():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, getattr(error, "lineno", 1), getattr(error, "msg", error)) from None
    if not isinstance(found, dict):
        raise damaged(path, 1, "is not an object")
    return found


def read_launch(path: Path) -> dict[str, Any]:
    """Return a launch record in today's layout; empty if there is none.

    Raises:
        DataError: it is damaged, or of a later layout.
    """
    found = read_object(path)
    if not found:
        return {}
    for name in OBJECTS:
        if not isinstance(found.get(name) or {}, dict):
            raise damaged(path, 1, f"{name} is not an object")
    for name in ("first_step", "world_size"):
        if type(found.get(name, 0)) is not int:
            raise damaged(path, 1, f"{name} is {found[name]!r}")
    try:
        return current(found)
    except ValueError as error:
        raise damaged(path, 1, error) from None


def read_rows(path: Path, types: Mapping[str, tuple[type, ...]]) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; an incomplete last line is left out.

    Args:
        path: file to read.
        types: types of values by name.

    Raises:
        DataError: a line is damaged.
    """
    text = _text(path)
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):  # no newline after it: the line is incomplete
                continue
            raise damaged(path, number, "is not JSON") from None
        if not isinstance(row, dict) or "step" not in row:
            raise damaged(path, number, "is not an object with a step")
        _check(path, number, row, types)
        found.append(row)
    return found


def damaged(path: Path, line: int, what: object) -> DataError:
    """Return the error for a record that can't be read."""
    return DataError(
        f"run={path.parent}: {path.name} line {line}: {what}. "
        f"Fix: mend that line, or move {path} away to report without it."
    )


def _check(
    path: Path, number: int, row: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]
) -> None:
    for name, allowed in types.items():
        value = row.get(name)
        if value is None and name != "step":
            continue
        fits = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        if fits and isinstance(value, dict):
            fits = all(isinstance(x, NUMBER) for x in value.values())
        if not fits or (name == "step" and row[name] < 0):
            raise damaged(path, number, f"{name} is {json.dumps(value)[:60]}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise damaged(path, line, "is not text") from None
    except OSError as error:
        raise damaged(path, 1, f"is not readable ({error.strerror})") from None
