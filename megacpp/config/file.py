"""Settings files: a run's own config.json, or TOML, YAML or JSON with some settings.

Sections nest or keys are dotted (`optim.lr = 1e-3`); `preset` names the base. No torch import.
"""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.config.presets import PRESETS
from megacpp.config.schema import Config
from megacpp.config.settings import Setting, flatten, settings_of
from megacpp.config.values import read_value, suggestion
from megacpp.errors import ConfigError, config_error, did_you_mean, shortened

SUFFIXES = (".json", ".toml", ".yaml", ".yml")
# Settings derived from the number of ranks: they are derived again.
DERIVES = {"mesh.dp_shard": -1, "train.grad_accum": 0, "train.tokens_per_step": 0}


@dataclass(frozen=True)
class ConfigFile:
    """Settings of a file: dotted key -> value; an empty preset names none."""

    path: Path
    preset: str
    values: dict[str, Any]


def read_config_file(path: Path) -> ConfigFile:
    """Return the settings of a file.

    Raises:
        ConfigError: unreadable, or with unknown keys or illegal values; a line for each.
    """
    content = _content(path)
    sources: dict[str, str] = {}
    if isinstance(content.get("config"), Mapping):  # config.json of a run
        told = content.get("provenance")
        sources = dict(told) if isinstance(told, Mapping) else {}
        content = dict(content["config"])
    name = str(content.pop("preset", ""))
    settings, values, wrong = settings_of(Config), {}, []
    if name and name not in PRESETS:
        near = did_you_mean(name, PRESETS)
        wrong.append(str(config_error("preset", name, "no such preset", near)))
    for key, value in _leaves(content):
        try:
            values[key] = _value(settings, key, value)
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(*(f"{path}: {line}" for line in wrong))
    if "fitted" in sources.values():
        values["memory.fit"] = "off"  # the file holds the fitted settings
    neutral = {key: value for key, value in DERIVES.items() if sources.get(key) == "derived"}
    return ConfigFile(path, name, values | neutral)


def _content(path: Path) -> dict[str, Any]:
    if path.suffix not in SUFFIXES:
        raise config_error("config", path, f"must end in {', '.join(SUFFIXES)}", "rename the file")
    try:
        content = _parsed(path)
    except OSError as error:
        what = f"can't be read ({error.strerror})"
        raise config_error("config", path, what, "give a file that is there") from None
    except (ValueError, RecursionError) as error:  # by json, tomllib, and for text not in UTF-8
        what = f"is not {path.suffix[1:].upper()} ({' '.join(str(error).split())})"
        raise config_error("config", path, what, "mend that place") from None
    if not isinstance(content, dict):
        raise config_error("config", path, "must be a table of settings", "write run.steps: 10")
    return content


def _parsed(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if importlib.util.find_spec("yaml") is None:
        raise config_error(
            "config",
            path,
            "needs PyYAML, which isn't installed",
            "run `pip install pyyaml`, or use TOML",
        )
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested tables."""
    for name, value in content.items():
        key = f"{prefix}{str(name).replace('-', '_')}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _value(settings: Mapping[str, Setting], key: str, value: Any) -> Any:
    """Convert a value of the file to the type of its setting."""
    if value is None and key not in settings and key in flatten(Config()):
        return None  # a section that is off
    if key not in settings:
        near = suggestion(key, settings, flags=False)
        raise ConfigError(f"{shortened(key)}: no such setting. Fix: {near}.")
    one = settings[key]
    if isinstance(value, bool) and {"on", "off"} & set(one.choices):
        value = "on" if value else "off"  # YAML reads off as false
    if value is None and one.optional:
        return None
    if one.kind is bool and isinstance(value, bool):
        return value
    text = isinstance(value, str)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    wants_text = one.kind is str or bool(one.choices)
    if (wants_text and not text) or not (text or number):
        shown = json.dumps(value, default=str)
        raise config_error(key, shown, f"must be {_words(one)}", f"write {_example(one)}")
    return read_value(key, one.kind, value if text else repr(value))


def _words(one: Setting) -> str:
    if one.kind is bool:
        return "true or false"
    return f"one of {', '.join(one.choices)}" if one.choices else f"{one.takes} in quotes"


def _example(one: Setting) -> str:
    return f"{one.key} = {json.dumps(one.default)}"
