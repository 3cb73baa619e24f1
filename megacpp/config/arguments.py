"""Command line to checked Config: `PRESET [--config FILE] [--section.key value ...]`.

Unknown flags and unreadable values are errors of one line. No torch import.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megacpp.config.checks.every import check, lookup, resolve, surprises
from megacpp.config.checks.mesh import batch_ranks, mesh_rules
from megacpp.config.environment import ranks_started
from megacpp.config.file import ConfigFile, read_config_file
from megacpp.config.help import run_help
from megacpp.config.presets import preset
from megacpp.config.recompute_flags import FALSE, TRUE, translate
from megacpp.config.saved import saved_tokens
from megacpp.config.schema import Config
from megacpp.config.settings import MISSING, field_name, flag_name, section_class, settings_of
from megacpp.config.settings import flatten as flatten
from megacpp.config.values import read_value as read_value
from megacpp.config.values import suggestion, utf8_words
from megacpp.errors import ConfigError, MegacppError, config_error, shortened
from megacpp.outcome import end_when_told, end_with, launcher, note, wait_quietly
from megacpp.terminal.screen import NOBODY_READS, end_on_interrupt, nobody_reads, show_any_text

Parsed = TypeVar("Parsed")
Default = TypeVar("Default")
GIVEN = ("command line", "config file")  # sources of explicit settings
LIKE_OWN = 0.7  # similarity at which an unknown word is a misspelt flag of the command


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Configuration ready to run, with the origin of each value.

    Attributes:
        config: resolved configuration.
        provenance: dotted key -> default, preset, config file, command line, checkpoint.init,
            derived or fitted.
        notes: flags that were translated to others.
    """

    config: Config
    provenance: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def given(self) -> list[str]:
        """Keys set by the command line or a file."""
        return [key for key, source in self.provenance.items() if source in GIVEN]


@dataclasses.dataclass(frozen=True)
class Written:
    """Configuration as written, before any rule is checked.

    Attributes:
        config: preset with the given settings.
        base: the preset.
        sources: given keys -> `command line`, `config file` or `checkpoint.init`.
        notes: flags that were translated to others.
    """

    config: Config
    base: Config
    sources: dict[str, str]
    notes: tuple[str, ...]

    @property
    def given(self) -> dict[str, Any]:
        """Given keys and their values."""
        given = (key for key, source in self.sources.items() if source in GIVEN)
        return {key: lookup(self.config, key) for key in given}


def parse_run(argv: Sequence[str], world_size: int, resumes: bool = False) -> Resolved:
    """Read `[PRESET] [--config FILE] [flags]`, check every rule, and resolve derived settings.

    Args:
        argv: words of the command line.
        world_size: number of ranks.
        resumes: the run starts now: its newest checkpoint determines the tokens of a step.

    Raises:
        ConfigError: unknown preset, flag or value, or a broken rule.
    """
    written = read_run(argv)
    config, notes = written.config, list(written.notes)
    if config.memory.fit == "auto" and (freed := _free_mesh(config, world_size)):
        config, note_of_it = freed
        notes.append(note_of_it)
        kept = {
            key: s
            for key, s in written.sources.items()
            if not _other(config, key, lookup(written.config, key))
        }
        written = dataclasses.replace(written, config=config, sources=kept)
    if resumes:
        config, as_saved = _as_saved(config, world_size)
        notes += as_saved
    check(config, world_size)
    final = resolve(config, world_size)
    notes += surprises(config, final)
    return Resolved(final, _provenance(written, final), tuple(notes))


def read_run(argv: Sequence[str]) -> Written:
    """Return the configuration as written, before any rule is checked.

    Raises:
        ConfigError: unknown preset, flag or value, or a file that can't be read.
    """
    arguments = list(argv)
    path = take_value(arguments, "--config", None)
    file = None if path is None else read_config_file(Path(path))
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    base = preset(_preset_name(name, file))
    unnamed = None if file is None or name or file.preset else file.path
    if unnamed:  # its runs aren't those of tiny
        base = replace_keys(base, {"run.dir": f"runs/{unnamed.stem}"})
    fit = take_value(arguments, "--fit", None)
    if fit is not None:  # a way to start, so it has a short name
        arguments += ["--memory.fit", fit]
    config, sources = base, {}
    if file is not None:
        config = replace_keys(base, file.values)
        changed = [key for key, value in flatten(config).items() if _other(base, key, value)]
        sources = dict.fromkeys(changed, "config file")
    arguments, notes = translate(arguments)
    if unnamed:
        notes.append(f"{unnamed} names no preset: what it leaves out is that of {base.preset}")
    given = dict(read_flags(arguments))
    sources |= dict.fromkeys(given, "command line")
    config = replace_keys(config, given)
    if config.checkpoint.init:
        from megacpp.interop.settings import with_weights

        config, found, more = with_weights(config, sources)
        sources, notes = found | sources, [*notes, *more]
    return Written(config, base, sources, tuple(notes))


def _preset_name(name: str, file: ConfigFile | None) -> str:
    """Return the preset that the command line or a file names, else `tiny`."""
    if file is None or not file.preset or name in ("", file.preset):
        return name or (file.preset if file else "") or "tiny"
    raise config_error(
        "preset", name, f"{file.path} is of the preset {file.preset}", "leave one of them out"
    )


def _other(base: Config, key: str, value: Any) -> bool:
    """Return whether the preset has another value there, or (YaRN) none."""
    try:
        return lookup(base, key) != value
    except AttributeError:
        return True


def _free_mesh(config: Config, world_size: int) -> tuple[Config, str] | None:
    """Remove a given mesh that doesn't fit this world; return None if it fits.

    An elastic launch with `--fit auto` can therefore continue when nodes are gone.
    """
    error = next(mesh_rules(config, world_size), None)
    if error is None:
        return None
    free = dataclasses.replace(config.mesh, pp=1, dp_replicate=1, dp_shard=-1, cp=1, tp=1, ep=1)
    why = str(error).partition(". Fix:")[0]
    return dataclasses.replace(config, mesh=free), f"{why}: memory.fit=auto chooses the mesh"


def _as_saved(config: Config, world_size: int) -> tuple[Config, list[str]]:
    """Use the saved run's tokens per step, if neither they nor microbatches are given.

    The same command is then the same run on any number of ranks.
    """
    train, folder = config.train, Path(config.run.dir.replace("{preset}", config.preset))
    if train.tokens_per_step or train.grad_accum or config.checkpoint.resume != "auto":
        return config, []
    tokens, path = saved_tokens(config, folder)
    per_micro = train.device_batch_size * config.data.seq_len
    if tokens in (0, per_micro * batch_ranks(config.mesh, world_size)):
        return config, []
    train = dataclasses.replace(train, tokens_per_step=tokens)
    note = f"train.tokens_per_step = {tokens} of {path}"
    return dataclasses.replace(config, train=train), [note]


def parse_or_exit(program: str) -> Resolved:
    """Return the configuration of `sys.argv`; print help or one error line and exit."""
    end_with(launcher())
    end_when_told()
    end_on_interrupt(at_once=True)  # while modules are imported; `guarded` ends that
    show_any_text()
    try:
        ranks = ranks_started(os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # the rank is unknown
        raise SystemExit(error.exit_code) from None
    try:
        words = utf8_words(sys.argv[1:])
        if flag := next((word for word in words if word in ("--help", "-h")), ""):
            after = words[words.index(flag) + 1 :]
            print_and_exit(run_help(program, after[0] if after else ""))
        return parse_run(words, ranks, resumes=True)
    except MegacppError as error:
        exit_on_error(error)


def print_and_exit(text: str) -> typing.NoReturn:
    """Print and exit, silently if the reader is gone (`--help | head`)."""
    try:
        print(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        nobody_reads(error)
        raise SystemExit(NOBODY_READS) from None
    raise SystemExit(0)


def exit_on_error(error: MegacppError, own: bool = False) -> typing.NoReturn:
    """Print the one line and exit with the error's code.

    Ranks other than the first (of a node, or of all if they agreed) print only an error of their
    `own`. Otherwise they wait until the first has printed, because torchrun ends all ranks as soon
    as one has exited.
    """
    rank = os.environ.get("RANK" if error.agreed else "LOCAL_RANK", "0")
    if rank == "0" or own:
        note(error.exit_code, str(error))
        whose = "" if rank == "0" else f"rank {rank}: "
        print(f"error: {whose}{error}", file=sys.stderr, flush=True)
    else:
        wait_quietly()
        note(error.exit_code, str(error))
    raise SystemExit(error.exit_code)


def split_args(
    cls: type[Parsed], argv: Sequence[str], alone: bool = False
) -> tuple[Parsed, list[str]]:
    """Return `cls` from its own flags and positional words, and the remaining words.

    Raises:
        ConfigError: a value that can't be read or is out of range, or one that is missing; first a
            remaining word, if `cls` is `alone`.
    """
    settings = settings_of(cls, top=True)
    kinds = {key: one.kind for key, one in settings.items()}
    places = [key for key, one in settings.items() if one.positional]
    left, values, rest = list(argv), {}, []
    leaves = {key.rpartition(".")[2] for key in leaf_types(Config)}
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
            of_a_run = not word.startswith("--") or name in leaves
            if not of_a_run and (close := difflib.get_close_matches(name, kinds, 1, LIKE_OWN)):
                fix = f"did you mean '{settings[close[0]].flag}'"
                raise ConfigError(
                    f"{shortened(word.partition('=')[0])}: no such setting. Fix: {fix}."
                )
            rest.append(word)
        else:
            own = [word, *(_value_words(kinds[key], left) if "=" not in word else ())]
            values |= dict(read_flags(own, kinds))
            places = [place for place in places if place != key]
    for _ in read_flags(rest if alone else (), kinds):
        pass  # the first word is refused
    for key, one in settings.items():
        if key in values and (error := one.broken(values[key])):
            raise error
        if key not in values and one.default is MISSING:
            form = key.upper() if one.positional else f"{one.flag} VALUE"
            what = one.words[:1].lower() + one.words[1:].rstrip(".")
            raise config_error(key, "", f"is needed: {what}", f"write {form}")
    fields = {flag_name(item.name): item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{fields[key]: value for key, value in values.items()}), rest


def _value_words(kind: Any, left: list[str]) -> list[str]:
    """Remove the value of a flag from `left` and return its words."""
    if typing.get_origin(kind) is tuple:
        return list(_take_words(left))
    if not left or left[0].startswith("--") or (kind is bool and left[0] not in TRUE + FALSE):
        return []
    return [left.pop(0)]


def parse_args(cls: type[Parsed], argv: Sequence[str]) -> Parsed:
    """Return the arguments of a command without run settings, `[FIRST] [--name value ...]`.

    Raises:
        ConfigError: as `split_args`, or an unknown word.
    """
    return split_args(cls, argv, alone=True)[0]


def take_value(arguments: list[str], flag: str, default: Default) -> str | Default:
    """Remove each `flag VALUE` (or `flag=VALUE`) from the arguments; return the last value.

    Raises:
        ConfigError: the flag has no value.
    """
    value: str | Default = default
    left = list(arguments)
    arguments.clear()
    while left:
        word = left.pop(0)
        if word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        elif word != flag:
            arguments.append(word)
        elif not left:
            raise ConfigError(f"{flag}=: needs a value. Fix: write {flag} VALUE.")
        else:
            value = left.pop(0)
    return value


def read_flags(
    arguments: Sequence[str], kinds: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value from `--a.b c`, `--a.b=c`, `--a.flag` and `--a.no-flag`.

    Raises:
        ConfigError: an unknown flag, or a value that is missing or can't be read.
    """
    fix, see = "write --section.key value", "see train.py --help"
    if kinds is not None:
        fix = see = "see --help"
    kinds = leaf_types(Config) if kinds is None else kinds
    left = list(arguments)
    while left:
        flag = left.pop(0)
        if not flag.startswith("--"):
            raise config_error("argument", flag, "is not a flag", fix)
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
            near = suggestion(key, kinds, otherwise=see)
            raise ConfigError(f"--{shortened(text)}: no such setting. Fix: {near}.")
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
    """Yield the words up to the next flag and remove them from `left`."""
    while left and not left[0].startswith("--"):
        yield left.pop(0)


def leaf_types(cls: Any, top: bool = False) -> dict[str, Any]:
    """Return dotted key -> type of every setting that a flag may set (see `settings_of`)."""
    return {key: one.kind for key, one in settings_of(cls, top=top).items()}


def replace_keys(config: Config, values: dict[str, Any]) -> Config:
    """Return `config` with dotted keys replaced; a YaRN key enables YaRN."""
    for key, value in values.items():
        config = _replace(config, key.split("."), value)
    return config


def _replace(node: Any, path: list[str], value: Any) -> Any:
    if len(path) == 1:
        return dataclasses.replace(node, **{field_name(path[0]): value})
    inner = getattr(node, path[0])
    if inner is None:
        inner = section_class(typing.get_type_hints(type(node))[path[0]])()
    return dataclasses.replace(node, **{path[0]: _replace(inner, path[1:], value)})


def _provenance(written: Written, final: Config) -> dict[str, str]:
    defaults = {key: one.default for key, one in settings_of(Config, top=True).items()}
    config, source = written.config, {}
    for key, value in flatten(final).items():
        if key in written.sources and lookup(config, key) == value:
            source[key] = written.sources[key]
        elif lookup(config, key) != value:
            source[key] = "derived"
        else:
            source[key] = "default" if defaults.get(key) == value else "preset"
    return source
