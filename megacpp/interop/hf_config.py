"""Settings of a model from a Hugging Face folder's config.json; no torch import here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.config.arguments import replace_keys
from megacpp.config.checks.every import broken
from megacpp.config.model import ModelConfig
from megacpp.config.saved import read_model_config, with_defaults
from megacpp.config.schema import Config
from megacpp.errors import CheckpointError, ConfigError, MegacppError, did_you_mean
from megacpp.interop.classes import class_named, to_config
from megacpp.interop.hf_class import HFClass
from megacpp.interop.keys import Values, WrongKeyError, needed
from megacpp.interop.layer_types import BY_LAYER, SLIDING
from megacpp.interop.table import CLASSES

OURS = "megacpp"  # key of config.json with our own settings
ALIASES = (("num_experts", "num_local_experts", "n_routed_experts"),)
INTERLEAVE = "rope_interleave"  # of rows of queries and keys; true where a file lacks it


COMPARE = "Fix: compare the file with that of a published model."
# Errors of rules that read a value of another type or size than a class has.
ODD = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)


@dataclass(frozen=True)
class HFConfig:
    """Config.json of a folder.

    Attributes:
        one: its class.
        values: its keys, with the class's defaults.
        model: settings of ours that compute the same.
    """

    one: HFClass
    values: Values
    model: ModelConfig


def read_hf_config(folder: Path) -> HFConfig:
    """Read config.json of a folder.

    Settings come from the key `megacpp` where there is one, if the other keys agree with it.

    Raises:
        ConfigError: a key or class that our settings don't express.
        CheckpointError: the file can't be read.
    """
    path = folder / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        kind = str(given["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: can't be read ({type(error).__name__}). "
            "Fix: give a folder of Hugging Face's format."
        ) from None
    one = class_named(kind)
    if one is None:
        known = did_you_mean(kind, [known.model_type for known in CLASSES])
        raise _refused(path, "model_type", kind, "isn't one that can be read", known)
    values = {**one.defaults, **_with_aliases(given)}
    try:
        if one.own:
            needed(values, OURS)
        _check_fixed(one, values)
        read = _settings(one, values)
        model = _own(path, one, given, read) if OURS in given else _made(path, read)
    except WrongKeyError as wrong:
        fix = "take a model without it, no setting of ours computes that"
        if wrong.value == "":
            fix = "give the config.json that belongs to the weights"
        raise _refused(path, wrong.key, wrong.value, wrong.rule, fix) from None
    except MegacppError:
        raise
    except ODD as error:
        raise CheckpointError(
            f"{path}: a value isn't of the kind that {kind} has ({type(error).__name__}: {error}). "
            f"{COMPARE}"
        ) from None
    for error in broken(dataclasses.replace(Config(), model=model), 1):
        if (text := str(error)).startswith("model."):
            rule = text.partition(". Fix: ")[0]
            raise ConfigError(f"{path}: {rule}. {COMPARE}")
    return HFConfig(one, values, model)


def _with_aliases(given: Values) -> dict[str, Any]:
    """Return keys under every name that transformers gives them."""
    found = dict(given)
    for names in ALIASES:
        value = next((given[name] for name in names if given.get(name) is not None), None)
        found |= {} if value is None else dict.fromkeys(names, value)
    return found


def _check_fixed(one: HFClass, values: Values) -> None:
    if (quantised := values.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "quantised")
        raise WrongKeyError("quantization_config", method, "dequantise the weights first")
    for key, legal in one.fixed.items():
        value = values.get(key, legal)
        if key == "sliding_window" and value and value >= values.get("max_position_embeddings", 0):
            continue
        if key in ("num_nextn_predict_layers", INTERLEAVE):
            continue  # extra layers are left out; the rows of queries and keys are reordered
        if value != legal:
            raise WrongKeyError(key, value, f"must be {json.dumps(legal)}")
    types = set(values.get("layer_types") or ())
    legal_types = {"full_attention", "linear_attention", "indexed_attention"}
    legal_types |= {SLIDING} if BY_LAYER[-1] in one.rules else set()
    if other := sorted(types - legal_types):
        raise WrongKeyError("layer_types", other[0], "must be full_attention")


def _settings(one: HFClass, values: Values) -> dict[str, Any]:
    """Return the settings that keys decide, dotted below `model`."""
    found: dict[str, Any] = dict(one.implied)
    for rule in one.rules:
        found |= rule.back(values)
    return found


def _made(path: Path, settings: Mapping[str, Any]) -> ModelConfig:
    """Return the settings that keys decide, whose types are checked."""
    keys = {f"model.{key}": value for key, value in settings.items()}
    model = replace_keys(dataclasses.replace(Config(), model=ModelConfig()), keys).model
    try:
        return read_model_config(dataclasses.asdict(model))
    except CheckpointError as wrong:
        rule = str(wrong).partition(" in config.json")[0]
        raise CheckpointError(f"{path}: {rule}. {COMPARE}") from None


def _own(path: Path, one: HFClass, given: Values, read: Mapping[str, Any]) -> ModelConfig:
    """Return the settings under `megacpp`, checked against the other keys of the file."""
    model = read_model_config(with_defaults(given[OURS].get("model", {})))
    written = _settings(one, {**one.defaults, **to_config(one, model)})
    both = {f"model.{key}": (read.get(key), written.get(key)) for key in {**written, **read}}
    if INTERLEAVE in one.fixed:  # as an export orders the rows
        both[INTERLEAVE] = (bool(given.get(INTERLEAVE, True)), True)
    for key, (there, here) in both.items():
        if there != here:
            raise ConfigError(
                f"{path}: its keys say {key}={there}, its key {OURS!r} says {here}. "
                f"Fix: remove {OURS!r} from it if the other keys are right."
            )
    return model


def _refused(path: Path, key: str, value: Any, rule: str, fix: str) -> ConfigError:
    return ConfigError(f"{path}: {key}={value}: {rule}. Fix: {fix}.")
