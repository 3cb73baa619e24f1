"""Conversion of text from a command line or a file to values of settings; imports no torch."""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from megacpp.config.recompute_flags import FALSE, TRUE
from megacpp.errors import config_error, did_you_mean

CLOSE = 0.6  # least similarity of a word to a choice: `fp8` isn't `fp64`
LARGEST = 2**63 - 1  # largest integer that tensors, files and generators accept
UNITS = "GiB", "MiB"  # that names of settings end with
FEW = 12  # settings of a section that an error still lists
# Choices that other trainers have and a setting doesn't -> why, and what to use.
REFUSED = {
    ("precision.fp8_recipe", "delayed"): (
        "scales by maxima of earlier steps: a history that isn't saved, isn't rewound after bad "
        "steps and isn't agreed between ranks",
        "use precision.fp8_recipe=rowwise_with_gw_hp, which scales by the numbers themselves",
    )
}


def utf8_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line.

    Raises:
        ConfigError: a word isn't text in this locale.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(word).decode(errors="backslashreplace")
            rule, fix = "isn't text in this locale", "write UTF-8, with LC_ALL=C.UTF-8"
            raise config_error("argument", shown, rule, fix) from None
    return list(words)


def read_value(key: str, kind: Any, text: str) -> Any:
    """Convert `text` to the type of a setting.

    Raises:
        ConfigError: it can't be read; the error names the legal values.
    """
    options = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        return read_value(key, next(o for o in options if o is not type(None)), text)
    if typing.get_origin(kind) is Literal:
        if (key, text) in REFUSED:
            raise config_error(key, text, *REFUSED[key, text])
        if text not in options:
            near = did_you_mean(text, options, CLOSE)
            fix = near if near.startswith("did") else "use one of these"
            raise config_error(key, text, f"must be one of {', '.join(filter(None, options))}", fix)
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
    what += next((f" of {unit}" for unit in UNITS if key.endswith(f"_{unit.lower()}")), "")
    wrong = config_error(key, text, f"must be {what}", "write digits")
    try:
        number = kind(text)  # 1_000 is a thousand, as in Python
    except ValueError:
        raise wrong from None
    if kind is int and not -LARGEST <= number <= LARGEST:
        raise config_error(key, text, f"must be from -{LARGEST} to {LARGEST}", "use fewer digits")
    if kind is float and not math.isfinite(number):
        raise wrong
    return number


def suggestion(
    key: str, known: Iterable[str], flags: bool = True, otherwise: str = "see train.py --help"
) -> str:
    """Return the likely meaning of an unknown key: by name, else by section, else `otherwise`.

    Args:
        key: unknown key.
        known: existing keys.
        flags: spell it as on a command line, not as in a file.
        otherwise: text without a suggestion.
    """
    dashes, spelled = ("--", "-") if flags else ("", "_")
    shown = [k.replace("_", spelled) for k in known]
    section, _, leaf = key.replace("_", spelled).rpartition(".")
    leaf = leaf.removeprefix(f"no{spelled}")
    same = [k for k in shown if k.rpartition(".")[2] == leaf]
    if len(same) == 1:
        return f"did you mean '{dashes}{same[0]}'"
    parts = [k.rpartition(".") for k in shown]
    if beside := [name for of, _, name in parts if section and of == section]:
        text = did_you_mean(leaf, beside, CLOSE)
        if text.startswith("did"):
            return text.replace("'", f"'{dashes}{section}.", 1)
        return f"of {section}, {text}" if len(beside) <= FEW else f"see train.py --help {section}"
    text = did_you_mean(key.replace("_", spelled), shown)
    return text.replace("'", f"'{dashes}", 1) if text.startswith("did") else otherwise


def flag_text(value: Any) -> str:
    """Return a value as it is typed after its flag."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
