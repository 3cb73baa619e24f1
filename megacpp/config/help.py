"""Help of runs and commands, from the sentences of their settings; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megacpp.config.presets import PRESETS, preset
from megacpp.config.schema import Config
from megacpp.config.settings import Setting, flatten, sections_of, settings_of
from megacpp.errors import EXIT_CODES, config_error, did_you_mean
from megacpp.terminal.screen import columns, labelled, wrapped

BESIDE = (26, 46)  # column where sentences start, on a narrow and on a wide screen
WIDE = 110
SHORT = {
    "--fit": "Short for --memory.fit: auto finds settings that fit the memory.",
    "--config": "A run's config.json, or a TOML or YAML file of settings; flags override it.",
}


def run_help(program: str, section: str = "") -> str:
    """Return all options of a run: presets, every flag with its default, exit codes.

    Args:
        program: name of the program.
        section: restrict to settings whose name starts with it (`optim`, `model.moe`).

    Raises:
        ConfigError: no setting of that name.
    """
    settings = settings_of(Config)
    if section:
        name = section.removeprefix("--").replace("-", "_")
        shown = {k: s for k, s in settings.items() if f"{k}.".startswith(f"{name}.")}
        if not shown:
            known = {k.rpartition(".")[0] for k in settings}
            near = did_you_mean(name, known)
            if not near.startswith("did"):
                near = did_you_mean(name, {k.partition(".")[0] for k in known})
            raise config_error("help", section, "no such section", near)
        return "\n".join(_sections(shown))
    width = 2 + max(map(len, PRESETS)) + 2
    return "\n".join(
        [
            *wrapped(f"usage: {program} [PRESET] [--config FILE] [--section.key VALUE ...]"),
            "",
            f"{program} --help SECTION shows the flags of one section.",
            "",
            "presets:",
            *(line for key in PRESETS for line in labelled(f"  {key}", headline(key), width)),
            "",
            "short flags:",
            *(line for flag, words in SHORT.items() for line in labelled(f"  {flag}", words, 14)),
            "",
            *wrapped(
                "flags, with the defaults of the preset `tiny` (any flag of model.attention.yarn "
                "turns YaRN on):"
            ),
            *_sections(settings),
            "",
            *exit_code_lines(),
        ]
    )


def headline(name: str) -> str:
    """Return the first line of a preset's docstring."""
    return (PRESETS[name].__doc__ or "").strip().splitlines()[0]


def command_help(
    usage: str, words: str, settings: Mapping[str, Setting], runs: bool = False
) -> str:
    """Return the help of a `megacpp` command.

    Args:
        usage: the command without its flags (`megacpp plan`).
        words: paragraphs about it.
        settings: its own flags.
        runs: it also takes preset and flags of a run; of a run that is there, flags alone.
    """
    flags = [one.place if one.required else f"[{one.place}]" for one in settings.values()]
    preset = [] if "run" in settings else ["[PRESET]", "[--config FILE]"]
    run = [*preset, "[--section.key VALUE ...]"] if runs else []
    # A flag and its value stay on one line.
    text = " ".join(word.replace(" ", "\u00a0") for word in (usage, *run, *flags))
    lines = wrapped(f"usage:\u00a0{text}", " " * 8)
    out = [line.replace("\u00a0", " ") for line in lines]
    for paragraph in words.split("\n\n"):
        out += ["", *_paragraph(paragraph)]
    if settings:
        out += ["", *flag_lines(settings.values(), {})]
    if runs:
        names = "PRESET and settings" if preset else "Settings"
        out += ["", f"{names} are those of `train.py --help`."]
    return "\n".join(out)


def flag_lines(settings: Iterable[Setting], defaults: Mapping[str, Any]) -> list[str]:
    """Return each flag with its sentence, unit, range, choices and default.

    Args:
        settings: flags to list.
        defaults: defaults by key; other settings have their own.
    """
    out = []
    for one in settings:
        note = _note(one, defaults.get(one.key, one.default))
        words = f"{one.words} ({note})" if note else one.words
        out += labelled(f"  {one.place}", words, BESIDE[columns() >= WIDE])
    return out


def exit_code_lines() -> list[str]:
    """Return the meaning of every command's exit codes."""
    return ["exit codes:", *(f"  {code:3}  {words}" for code, words in EXIT_CODES.items())]


def _sections(settings: Mapping[str, Setting]) -> list[str]:
    # YaRN is off in `tiny`: its own defaults are shown.
    defaults, out = flatten(preset("tiny")), []
    for section, words in sections_of(Config):
        here = [s for s in settings.values() if s.key.rpartition(".")[0] == section]
        if here:
            out += ["", *wrapped(f"{section}: {words}"), *flag_lines(here, defaults)]
    return out


def _note(one: Setting, default: Any) -> str:
    """Return unit, range and default, such as `tokens, at least 2; default 256`."""
    limits = ", ".join(str(part) for part in (one.unit, one.range) if part)
    if one.choices:
        limits = ", ".join(one.choices)
    if one.kind is bool:
        return f"default on; {one.negative}" if default else ""
    if one.required:
        return f"{limits}; needed" if limits else "needed"
    if default in ("", ()):
        return limits
    if isinstance(default, tuple):
        default = " ".join(default)
    shown = "none" if default is None else str(default)
    shown = repr(shown) if "\n" in shown or " " in shown else shown
    return f"{limits}; default {shown}" if limits else f"default {shown}"


def _paragraph(text: str) -> list[str]:
    """Fill a paragraph of a docstring; an indented one stays as it is."""
    if text.startswith(" "):
        return text.splitlines()
    return wrapped(" ".join(text.split()), "")
