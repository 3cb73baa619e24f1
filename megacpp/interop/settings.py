"""Settings of a model as its first weights need them; no torch import here."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from megacpp.config.arguments import replace_keys
from megacpp.config.model import ModelConfig
from megacpp.config.schema import Config
from megacpp.config.settings import flatten, settings_of
from megacpp.interop.places import locate, model_folder, read_model

INIT = "checkpoint.init"


def with_weights(
    config: Config, sources: Mapping[str, str]
) -> tuple[Config, dict[str, str], list[str]]:
    """Take the settings of the model from the folder of its weights, but for given ones.

    Args:
        config: configuration with `checkpoint.init`.
        sources: given keys and where they were given.

    Returns:
        The configuration, the origin of each setting that was taken, and a note for each given one
        that differs from the folder's.

    Raises:
        ConfigError: the folder holds no weights, or settings that aren't ours.
        CheckpointError: its settings can't be read.
    """
    folder = model_folder(config)
    theirs = dataclasses.replace(config, model=read_model(locate(folder, INIT, "settings")))
    before, there = flatten(config), flatten(theirs)
    given = {key: before[key] for key in sources if key.startswith("model.") and key in before}
    notes = [
        f"{key} = {value}: {folder} has {there.get(key)}"
        for key, value in given.items()
        if there.get(key) != value
    ]
    taken = [key for key, value in there.items() if before.get(key) != value]
    return replace_keys(theirs, given), dict.fromkeys(taken, INIT), notes


def flags_between(before: ModelConfig, after: ModelConfig) -> list[str]:
    """Return the flags that make one model's settings another's, as they are typed."""
    old, new = flatten(before, "model."), flatten(after, "model.")
    known = settings_of(ModelConfig, "model.")  # not a section that is off
    changed = {key: value for key, value in new.items() if key in known and old.get(key) != value}
    return [f"--{key.replace('_', '-')} {_typed(value)}" for key, value in changed.items()]


def _typed(value: object) -> str:
    """Return a value as it is typed in a shell."""
    return shlex.quote(
        str(value).lower() if value is None or isinstance(value, bool) else str(value)
    )
