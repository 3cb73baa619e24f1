"""From the command line to a checked Config: `PRESET [--section.key value ...]`.

tyro parses and writes the help; unknown flags and unreadable values are caught first, so that a
mistake is one line. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from megacpp.config import Config, YarnConfig
from megacpp.errors import ConfigError, MegacppError, config_error, did_you_mean
from megacpp.presets import PRESETS, preset
from megacpp.recompute_flags import FALSE, TRUE, compiles, translate
from megacpp.rules import check, lookup, resolve
from megacpp.settings import flatten as flatten
from megacpp.settings import settings_of

Parsed = TypeVar("Parsed")
FEW = 12  # settings of a section that an error still lists
CLOSE = 0.6  # of a setting's short words: below it `fp8` would mean `fp64`


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration ready to run and where each value came from."""

    config: Config
    provenance: dict[str, str]  # dotted key -> default | preset | command line | derived | fitted
    notes: tuple[str, ...] = ()  # flags that were read as others


def parse_run(argv: Sequence[str], world_size: int) -> Resolved:
    """Reads `[PRESET] [flags]`, checks every rule and resolves what is derived.

    Raises:
        ConfigError: unknown preset, flag or value, or a broken rule.
    """
    config, given, notes = read_run(argv)
    check(config, world_size)
    final = resolve(config, world_size)
    return Resolved(final, _provenance(config, final, given), tuple(notes))


def read_run(argv: Sequence[str]) -> tuple[Config, dict[str, Any], list[str]]:
    """The configuration as written, no rule checked; the keys that flags set; what was translated.

    Raises:
        ConfigError: unknown preset, flag or value.
    """
    arguments = list(argv)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "tiny"
    base = preset(name)
    if fit := take_value(arguments, "--fit", ""):  # a way to start, so it has a short name
        arguments += ["--memory.fit", fit]
    arguments, notes = translate(arguments, compiles(arguments, base.train.compile != "off"))
    given = dict(read_flags(arguments))
    return replace_keys(base, given), given, notes


def parse_or_exit(program: str) -> Resolved:
    """The configuration of `sys.argv` under torchrun; prints help or one error line and exits."""
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        with contextlib.suppress(BrokenPipeError):  # `--help | head`
            print_help(program)
            sys.stdout.flush()
            raise SystemExit(0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    try:
        return parse_run(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")))
    except MegacppError as error:
        exit_on_error(error)


def _help_of(cls: Any, program: str, default: Any = None) -> str:
    """What tyro says of a dataclass."""
    import tyro

    given = {} if default is None else {"default": default}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        tyro.cli(tyro.conf.AvoidSubcommands[cls], prog=program, args=["--help"], **given)
    return out.getvalue()


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


def print_help(program: str) -> None:
    """The full help of a run: presets and every flag with its default."""
    print(f"usage: {program} [PRESET] [--section.key value ...]\n\npresets:")
    for key, function in PRESETS.items():
        headline = (function.__doc__ or "").strip().splitlines()[0]
        print(f"  {key:16} {headline}")
    print(
        "\nflags (defaults of the preset `tiny`; any flag of model.attention.yarn turns YaRN on):\n"
    )
    # YaRN is off in `tiny`: with it, its flags are listed like the others.
    default = replace_keys(preset("tiny"), {"model.attention.yarn": YarnConfig()})
    text = _help_of(Config, program, default)
    print(text[text.index(" model options") :])


def parse_args(cls: type[Parsed], argv: Sequence[str], program: str) -> Parsed:
    """The flat arguments of a subcommand, `[FIRST] [--name value ...]`, as its dataclass.

    One word without dashes is the first field (`megacpp data inspect PATH`). tyro writes the
    help; a mistake raises ConfigError with one line.
    """
    if "--help" in argv or "-h" in argv:
        print(_help_of(cls, program))
        raise SystemExit(0)
    kinds = leaf_types(cls, top=True)
    words = list(argv)
    if words and not words[0].startswith("-"):
        words = [f"--{next(iter(kinds))}", *words]
    given = dict(read_flags(words, kinds))
    required = [
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in given:
            raise config_error(name, "", "is needed", f"write --{name.replace('_', '-')} VALUE")
    return cls(**given)


def wants_help(arguments: list[str], command: Callable[..., int]) -> bool:
    """Prints the docstring of a subcommand when its arguments ask for help."""
    if "--help" not in arguments and "-h" not in arguments:
        return False
    print(inspect.cleandoc(command.__doc__ or ""))
    return True


def take_flag(arguments: list[str], flag: str) -> bool:
    """Removes `flag` from the arguments; whether it was there."""
    found = flag in arguments
    while flag in arguments:
        arguments.remove(flag)
    return found


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


def refuse_rest(arguments: list[str]) -> None:
    """ConfigError for words that a subcommand has no use for."""
    if arguments:
        raise ConfigError(f"argument={arguments[0]}: is not known here. Fix: see --help.")


def take_int(arguments: list[str], flag: str, default: int) -> int:
    """Removes `flag N` from the arguments and returns N."""
    return read_value(flag.lstrip("-"), int, take_value(arguments, flag, str(default)))


def read_flags(
    arguments: Sequence[str], kinds: dict[str, Any] | None = None
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
            raise ConfigError(f"--{text}: no such setting. Fix: {_suggest(key, kinds)}.")
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


def read_value(key: str, kind: Any, text: str) -> Any:
    """`text` as the type of a setting; ConfigError that names what would be legal."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        return read_value(key, next(o for o in options if o is not type(None)), text)
    if typing.get_origin(kind) is Literal:
        if text not in options:
            near = did_you_mean(text, options, CLOSE)
            fix = near if near.startswith("did") else "use one of these"
            raise config_error(key, text, f"must be one of {', '.join(options)}", fix)
        return text
    if kind is bool:
        if text not in TRUE + FALSE:
            raise config_error(key, text, "must be true or false", f"write --{key} true")
        return text in TRUE
    if kind is str:
        return text
    if typing.get_origin(kind) is tuple:
        return tuple(text.split(","))
    what = "a whole number" if kind is int else "a finite number"
    try:
        number = kind(text.replace("_", "")) if kind is int else kind(text)
    except ValueError:
        raise config_error(key, text, f"must be {what}", "write digits") from None
    if not math.isfinite(number):
        raise config_error(key, text, f"must be {what}", "write digits")
    return number


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


def _suggest(key: str, kinds: dict[str, Any]) -> str:
    """The setting that was meant: of that name, else of that section, else see --help."""
    shown = [k.replace("_", "-") for k in kinds]
    section, _, leaf = key.replace("_", "-").rpartition(".")
    leaf = leaf.removeprefix("no-")
    same = [k for k in shown if k.rpartition(".")[2] == leaf]
    if len(same) == 1:
        return f"did you mean '--{same[0]}'"
    parts = [k.rpartition(".") for k in shown]
    if beside := [name for of, _, name in parts if section and of == section]:
        text = did_you_mean(leaf, beside, CLOSE)
        if text.startswith("did"):
            return text.replace("'", f"'--{section}.", 1)
        few = len(beside) <= FEW
        return f"of {section}, {text}" if few else f"see '{section} options' in --help"
    text = did_you_mean(key.replace("_", "-"), shown)
    return text.replace("'", "'--", 1) if text.startswith("did") else "see --help"


def _provenance(config: Config, final: Config, given: dict[str, Any]) -> dict[str, str]:
    defaults = flatten(Config()) | flatten(YarnConfig(), "model.attention.yarn.")
    source: dict[str, str] = {}
    for key, value in flatten(final).items():
        if key in given and lookup(config, key) == value:
            source[key] = "command line"
        elif lookup(config, key) != value:
            source[key] = "derived"
        else:
            source[key] = "default" if defaults.get(key) == value else "preset"
    return source
