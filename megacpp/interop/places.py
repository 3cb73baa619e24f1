"""Folders that weights come from or go to, and the settings of their model; no torch import here.

They come from a run, its `final/`, one of its checkpoints, or a folder of Hugging Face's format.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megacpp.config.model import ModelConfig
from megacpp.config.saved import read_model_config, with_defaults
from megacpp.config.schema import Config
from megacpp.errors import CheckpointError, config_error
from megacpp.interop.hf_config import read_hf_config
from megacpp.state.files import read_parsed
from megacpp.state.local_copy import Part, local_copy
from megacpp.state.manifest import NAME as MANIFEST
from megacpp.state.manifest import DamagedError, read_json, read_manifest
from megacpp.state.published import EXTRA, latest_checkpoint, overtaken, read_extra
from megacpp.terminal.screen import check_folder


@dataclass(frozen=True)
class WeightsFolder:
    """Folder with weights.

    Attributes:
        kind: format of the folder.
        folder: the folder itself.
        run: folder of the run that made it, if it is there.
    """

    kind: Literal["final", "checkpoint", "hf"]
    folder: Path
    run: Path | None = None


def check_target(folder: Path) -> None:
    """Check that a folder can be written; call it before any work.

    Raises:
        ConfigError: the folder is in use, or may not be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise config_error("out", folder, "is there already", "give --out another folder")
    check_folder("out", folder)


def locate(source: str, key: str, part: Part = "weights") -> WeightsFolder:
    """Return the folder that a source names: of a run, its final weights or newest checkpoint.

    Args:
        source: folder, or its URL, which is copied to the cache.
        key: setting that names it, for messages.
        part: what is needed of the folder.

    Raises:
        ConfigError: no weights are known to be there.
    """
    folder = Path(local_copy(source, key, part))
    try:
        there = folder.is_dir()
    except OSError:  # a name that is too long, or a loop of links
        there = False
    if not there:
        raise config_error(key, source, "no such folder", "give a run, or a folder with weights")
    if (folder / EXTRA).is_file():
        return WeightsFolder("checkpoint", folder, _run_above(folder.parent))
    if (folder / MANIFEST).is_file():
        return WeightsFolder("final", folder, _run_above(folder))
    if (folder / "final" / MANIFEST).is_file():
        if note := overtaken(folder):
            print(note, file=sys.stderr)
        return WeightsFolder("final", folder / "final", folder)
    if newest := latest_checkpoint(folder / "checkpoints"):
        if (folder / "final").is_dir():
            print(f"note: {folder}/final has no {MANIFEST}: taking {newest}", file=sys.stderr)
        return WeightsFolder("checkpoint", newest, folder)
    if "model_type" in read_parsed(folder / "config.json"):
        return WeightsFolder("hf", folder)
    raise config_error(
        key,
        source,
        "holds no final weights, no checkpoint and no config.json with a model_type",
        "give a run, a checkpoint or a folder of Hugging Face's format",
    )


def model_folder(config: Config) -> str:
    """Return the folder whose settings of the model a run with `checkpoint.init` takes.

    Its own checkpoint, if it goes on from one: the first weights may be gone by then.
    """
    return resumed_from(config) or config.checkpoint.init


def resumed_from(config: Config) -> str:
    """Return the checkpoint that a run goes on from; empty: it starts anew."""
    if config.checkpoint.resume not in ("auto", "never"):
        return config.checkpoint.resume
    folder = Path(config.run.dir.replace("{preset}", config.preset)) / "checkpoints"
    newest = latest_checkpoint(folder) if config.checkpoint.resume == "auto" else None
    return str(newest or "")


def read_model(place: WeightsFolder) -> ModelConfig:
    """Return the settings of the model whose weights are in a folder.

    Raises:
        ConfigError: a key of Hugging Face's config.json that our settings don't express.
        CheckpointError: the settings can't be read.
    """
    if place.kind == "hf":
        return read_hf_config(place.folder).model
    if place.kind == "final":
        name = "config.json"
        try:
            values = read_json(place.folder, name, read_manifest(place.folder, "export"))
        except DamagedError as damage:
            raise CheckpointError(f"{damage}. Fix: give another folder.") from None
    else:
        name, values = EXTRA, read_extra(place.folder).get("config")
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise CheckpointError(
            f"{place.folder / name}: has no settings of a model. Fix: give another folder."
        )
    return read_model_config(with_defaults(values["model"]))


def saved_step(place: WeightsFolder) -> int:
    """Return the number of steps that made the weights; 0 for another program's."""
    if place.kind == "hf":
        return int((read_parsed(place.folder / "config.json").get("megacpp") or {}).get("step", 0))
    return int(read_parsed(place.folder / MANIFEST).get("step", 0))


def _run_above(folder: Path) -> Path | None:
    return folder.parent if (folder.parent / "config.json").is_file() else None
