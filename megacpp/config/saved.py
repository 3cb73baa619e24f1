"""Settings of a model from the JSON of a saved folder; no torch import here."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp.config.model import ModelConfig
from megacpp.errors import CheckpointError

if TYPE_CHECKING:
    from megacpp.config.schema import Config


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings of a model, with today's default for those that an older one lacked.

    A setting that didn't exist had the effect of its default.
    """
    return _merged(dataclasses.asdict(ModelConfig()), values)


def read_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Return a ModelConfig from JSON.

    Raises:
        CheckpointError: a field is missing, unknown or of the wrong type.
    """
    return _dataclass(ModelConfig, values, "model")


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    found = {**defaults, **given}
    for key, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(given.get(key), Mapping):
            found[key] = _merged(value, given[key])
    return found


def saved_tokens(config: Config, folder: Path) -> tuple[int, object]:
    """Return the tokens per step of the checkpoint that a run goes on from, and its name; or 0.

    Args:
        config: configuration as written.
        folder: run folder.

    Raises:
        ConfigError: `checkpoint.remote` can't be read.
    """
    from megacpp.state.published import candidates, read_extra
    from megacpp.state.remote import newer_extra, url_of
    from megacpp.urls import is_url

    if is_url(url_of(config)) and (found := newer_extra(config, folder)):
        return found[1].get("tokens_per_step", 0), found[0]
    here = candidates(folder / "checkpoints")
    for path in here if config.checkpoint.damaged == "older" else here[:1]:
        with contextlib.suppress(CheckpointError, KeyError):  # damage is reported on resume
            return read_extra(path)["tokens_per_step"], path
    return 0, folder


def _dataclass(cls: Any, values: Any, where: str) -> Any:
    hints = typing.get_type_hints(cls)
    if not isinstance(values, Mapping):
        raise _wrong_config(where, "is not an object of settings")
    known, given = {f.name for f in dataclasses.fields(cls)}, set(values)
    wrong = sorted(known ^ given)
    if wrong:
        what = "is missing" if wrong[0] in known else "is unknown"
        raise _wrong_config(f"{where}.{wrong[0]}", what)
    return cls(**{k: _value(hints[k], v, f"{where}.{k}") for k, v in values.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if legal := typing.get_args(kind):  # choices of a Literal
        fits = value in legal
    else:
        fits = type(value) in ((int, float) if kind is float else (kind,))
    if not fits:
        raise _wrong_config(where, f"can't be {value!r}")
    return value


def _wrong_config(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where}: {what} in config.json. Fix: use the megacpp that wrote it.")
