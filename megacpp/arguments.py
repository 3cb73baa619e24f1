"""From the command line to a checked Config: `PRESET [--config FILE] [--section.key value ...]`.

Unknown flags and unreadable values are one line. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megacpp.config import Config, YarnConfig
from megacpp.config_file import ConfigFile, read_config_file
from megacpp.errors import ConfigError, MegacppError, config_error
from megacpp.help import run_help
from megacpp.presets import preset
from megacpp.recompute_flags import FALSE, TRUE, compiles, translate
from megacpp.rules import check, lookup, resolve
from megacpp.settings import MISSING, settings_of
from megacpp.settings import flatten as flatten
from megacpp.values import read_value as read_value
from megacpp.values import suggestion

Parsed = TypeVar("Parsed")
GIVEN = ("command line", "config file")  # sources of what somebody asked for


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration ready to run and where each value came from.

    Attributes:
        provenance: dotted key -> default, preset, config file, command line, derived or fitted.
        notes: flags that were read as others.
    """

    config: Config
    provenance: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def given(self) -> list[str]:
        """Keys that the command line or a file set."""
        return [key for key, source in self.provenance.items() if source in GIVEN]


@dataclasses.dataclass(frozen=True)
class Written:
    """A configuration as it is written, no rule checked.

    Attributes:
        base: the preset.
        sources: keys that were given -> `command line` or `config file`.
        notes: flags that were read as others.
    """

    config: Config
    base: Config
    sources: dict[str, str]
    notes: tuple[str, ...]

    @property
    def given(self) -> dict[str, Any]:
        """Keys that were given and their values."""
        return {key: lookup(self.config, key) for key in self.sources}


def parse_run(argv: Sequence[str], world_size: int) -> Resolved:
    """Reads `[PRESET] [--config FILE] [flags]`, checks every rule, resolves what is derived.

    Raises:
        ConfigError: unknown preset, flag or value, or a broken rule.
    """
    written = read_run(argv)
    check(written.config, world_size)
    final = resolve(written.config, world_size)
    return Resolved(final, _provenance(written, final), written.notes)


def read_run(argv: Sequence[str]) -> Written:
    """The configuration as written, no rule checked.

    Raises:
        ConfigError: unknown preset, flag or value, or a file that can't be read.
    """
    arguments = list(argv)
    path = take_value(arguments, "--config", "")
    file = read_config_file(Path(path)) if path else None
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    base = preset(_preset_name(name, file))
    if fit := take_value(arguments, "--fit", ""):  # a way to start, so it has a short name
        arguments += ["--memory.fit", fit]
    config, sources = base, {}
    if file is not None:
        config = replace_keys(base, file.values)
        changed = [key for key, value in flatten(config).items() if _other(base, key, value)]
        sources = dict.fromkeys(changed, "config file")
    arguments, notes = translate(arguments, compiles(arguments, config.train.compile != "off"))
    given = dict(read_flags(arguments))
    sources |= dict.fromkeys(given, "command line")
    return Written(replace_keys(config, given), base, sources, tuple(notes))


def _preset_name(name: str, file: ConfigFile | None) -> str:
    """The preset that the command line or a file names, else `tiny`."""
    if file is None or not file.preset or name in ("", file.preset):
        return name or (file.preset if file else "") or "tiny"
    raise config_error(
        "preset", name, f"{file.path} is of the preset {file.preset}", "leave one of them out"
    )


def _other(base: Config, key: str, value: Any) -> bool:
    """Whether the preset has another value there, or (YaRN) none."""
    try:
        return lookup(base, key) != value
    except AttributeError:
        return True


def parse_or_exit(program: str) -> Resolved:
    """The configuration of `sys.argv` under torchrun; prints help or one error line and exits."""
    words = sys.argv[1:]
    try:
        if flag := next((word for word in words if word in ("--help", "-h")), ""):
            after = words[words.index(flag) + 1 :]
            print_and_exit(run_help(program, after[0] if after else ""))
        return parse_run(words, int(os.environ.get("WORLD_SIZE", "1")))
    except MegacppError as error:
        exit_on_error(error)


def print_and_exit(text: str) -> typing.NoReturn:
    """Prints and ends with 0, also where nobody reads on (`--help | head`)."""
    with contextlib.suppress(BrokenPipeError):
        print(text)
        sys.stdout.flush()
        raise SystemExit(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def exit_on_error(error: MegacppError, own: bool = False) -> typing.NoReturn:
    """Prints the one line and exits with the error's code.

    Other ranks than the first print only an error of their `own`; otherwise they wait until the
    first has printed, because torchrun ends everybody as soon as one rank is gone.
    """
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif own:
        print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)
    raise SystemExit(error.exit_code)


def split_args(cls: type[Parsed], argv: Sequence[str]) -> tuple[Parsed, list[str]]:
    """`cls` from its own flags and positional words, and the words that are of something else.

    Raises:
        ConfigError: a value that can't be read or is out of range, or one that is missing.
    """
    settings = settings_of(cls, top=True)
    kinds = {key: one.kind for key, one in settings.items()}
    places = [key for key, one in settings.items() if one.positional]
    left, values, rest = list(argv), {}, []
    while left:
        word = left.pop(0)
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        key = name if name in kinds else name.removeprefix("no_")
        if not word.startswith("-") and places:
            place = places[0]
            if typing.get_origin(kinds[place]) is tuple:  # all further words
                kind = typing.get_args(kinds[place])[0]
                values[place] = (*values.get(place, ()), read_value(place, kind, word))
                continue
            values[place] = read_value(place, kinds[place], word)
            del places[0]
        elif not word.startswith("--") or key not in kinds:
            rest.append(word)
        else:
            own = [word, *(_value_words(kinds[key], left) if "=" not in word else ())]
            values |= dict(read_flags(own, kinds))
            places = [place for place in places if place != key]
    for key, one in settings.items():
        if key in values and (error := one.broken(values[key])):
            raise error
        if key not in values and one.default is MISSING:
            form = key.upper() if one.positional else f"{one.flag} VALUE"
            raise config_error(key, "", "is needed", f"write {form}")
    return cls(**values), rest


def _value_words(kind: Any, left: list[str]) -> list[str]:
    """The words behind a flag that are its value, removed from `left`."""
    if typing.get_origin(kind) is tuple:
        return list(_take_words(left))
    if not left or left[0].startswith("--") or (kind is bool and left[0] not in TRUE + FALSE):
        return []
    return [left.pop(0)]


def parse_args(cls: type[Parsed], argv: Sequence[str]) -> Parsed:
    """The arguments of a command that has only its own, `[FIRST] [--name value ...]`.

    Raises:
        ConfigError: as `split_args`, or a word that is none of them.
    """
    args, rest = split_args(cls, argv)
    for _ in read_flags(rest, {k: one.kind for k, one in settings_of(cls, top=True).items()}):
        pass  # the first word is refused
    return args


def take_value(arguments: list[str], flag: str, default: str) -> str:
    """Removes `flag VALUE` (or `flag=VALUE`) from the arguments and returns the value."""
    for i, word in enumerate(arguments):
        if word.startswith(f"{flag}="):
            return arguments.pop(i).partition("=")[2]
        if word == flag:
            if i + 1 == len(arguments):
                raise ConfigError(f"{flag}=: needs a value. Fix: write {flag} VALUE.")
            value = arguments[i + 1]
            del arguments[i : i + 2]
            return value
    return default


def read_flags(
    arguments: Sequence[str], kinds: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Pairs of dotted key and value from `--a.b c`, `--a.b=c`, `--a.flag` and `--a.no-flag`."""
    kinds = leaf_types(Config) if kinds is None else kinds
    left = list(arguments)
    while left:
        flag = left.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"argument={flag}: is no flag. Fix: write --section.key value.")
        text, equals, inline = flag[2:].partition("=")
        key = text.replace("-", "_")
        section, dot, leaf = key.rpartition(".")
        positive = f"{section}{dot}{leaf.removeprefix('no_')}"
        if key not in kinds and leaf.startswith("no_") and kinds.get(positive) is bool:
            if equals:
                raise config_error(positive, inline, f"--{text} takes no value", f"write --{text}")
            yield positive, False
            continue
        if key not in kinds:
            raise ConfigError(f"--{text}: no such setting. Fix: {suggestion(key, kinds)}.")
        bare = not equals and (not left or left[0].startswith("--"))
        if kinds[key] is bool and bare:
            yield key, True
            continue
        if typing.get_origin(kinds[key]) is tuple and not equals and not bare:
            yield key, tuple(_take_words(left))
            continue
        if bare:
            raise config_error(key, "", "needs a value", f"write --{text} VALUE")
        yield key, read_value(key, kinds[key], inline if equals else left.pop(0))


def _take_words(left: list[str]) -> Iterator[str]:
    """The words up to the next flag, removed from `left`."""
    while left and not left[0].startswith("--"):
        yield left.pop(0)


def leaf_types(cls: Any, top: bool = False) -> dict[str, Any]:
    """Dotted key -> type of every setting that a flag may set (see `settings_of`)."""
    return {key: one.kind for key, one in settings_of(cls, top=top).items()}


def replace_keys(config: Config, values: dict[str, Any]) -> Config:
    """`config` with dotted keys replaced; a YaRN key switches YaRN on."""
    for key, value in values.items():
        config = _replace(config, key.split("."), value)
    return config


def _replace(node: Any, path: list[str], value: Any) -> Any:
    if len(path) == 1:
        return dataclasses.replace(node, **{path[0]: value})
    inner = getattr(node, path[0])
    if inner is None:
        inner = YarnConfig()
    return dataclasses.replace(node, **{path[0]: _replace(inner, path[1:], value)})


def _provenance(written: Written, final: Config) -> dict[str, str]:
    defaults = flatten(Config()) | flatten(YarnConfig(), "model.attention.yarn.")
    config, source = written.config, {}
    for key, value in flatten(final).items():
        if key in written.sources and lookup(config, key) == value:
            source[key] = written.sources[key]
        elif lookup(config, key) != value:
            source[key] = "derived"
        else:
            source[key] = "default" if defaults.get(key) == value else "preset"
    return source
