"""Setting: default, sentence, unit and range as metadata of a dataclass field.

Help, completion, range rules and tables are generated from it. No torch import.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Any

from megacpp.errors import ConfigError, config_error

# Most of a size: beyond them nothing can be trained, and rules and reports count one by one.
WIDEST = 1 << 24  # dims: 256 times the width of the widest model
MANY = 1 << 16  # heads, and dims of one


@dataclass(frozen=True)
class Range:
    """Legal values of a number; a bound of None is open.

    `least_itself` and `most_itself` tell whether the bound itself is legal.
    """

    least: float | None = None
    most: float | None = None
    least_itself: bool = True
    most_itself: bool = True

    def holds(self, value: float) -> bool:
        """Return whether a value is legal."""
        if self.least is not None and not (value > self.least or self._is(value, self.least, True)):
            return False
        return self.most is None or value < self.most or self._is(value, self.most, False)

    def _is(self, value: float, bound: float, low: bool) -> bool:
        return value == bound and (self.least_itself if low else self.most_itself)

    def missed(self, value: float) -> Range:
        """Return the bound that a value violates, alone."""
        low = Range(self.least, None, self.least_itself)
        return Range(None, self.most, most_itself=self.most_itself) if low.holds(value) else low

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            left, right = "(["[self.least_itself], ")]"[self.most_itself]
            return f"in {left}{self.least}, {self.most}{right}"
        if self.most is not None:
            return f"{'at most' if self.most_itself else 'below'} {self.most}"
        return f"{'at least' if self.least_itself else 'above'} {self.least}"


@dataclass(frozen=True)
class Setting:
    """Setting of a dataclass, as a flag.

    Attributes:
        key: dotted name (`optim.lr`).
        kind: type.
        default: MISSING if it is required.
        words: sentence.
        unit: unit of a number.
        range: legal values.
        positional: a word without dashes may give it.
    """

    key: str
    kind: Any
    default: Any
    words: str = ""
    unit: str = ""
    range: Range | None = None
    positional: bool = False

    @property
    def flag(self) -> str:
        """Flag with its dashes."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING

    @property
    def place(self) -> str:
        """Usage, such as `--run.steps INT` or `RUN`."""
        if self.positional:
            return self.key.upper()
        return f"{self.flag} {'NAME' if self.choices else self.takes}".rstrip()

    @property
    def negative(self) -> str:
        """Flag that disables a switch."""
        section, dot, leaf = self.flag[2:].rpartition(".")
        return f"--{section}{dot}no-{leaf}"

    @property
    def choices(self) -> tuple[str, ...]:
        """Legal words of a Literal; none for other types."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is typing.Literal else ()

    @property
    def optional(self) -> bool:
        """Whether `none` is legal."""
        return type(None) in typing.get_args(self.kind)

    @property
    def takes(self) -> str:
        """Form of a value in help: `INT`, `FLOAT|none`, `gqa|mla`, empty for a switch."""
        if self.kind is bool:
            return ""
        if self.choices:
            return "|".join(self.choices)
        plain = next(k for k in (*typing.get_args(self.kind), self.kind) if k is not type(None))
        if typing.get_origin(self.kind) is tuple:
            return "TEXT ..."
        name = {int: "INT", float: "FLOAT", str: "TEXT"}[plain]
        return f"{name}|none" if self.optional else name

    def broken(self, value: Any) -> ConfigError | None:
        """Return the error for a value out of range, or None."""
        if self.range is None or value is None or self.range.holds(value):
            return None
        whole = isinstance(value, int) and not isinstance(self.default, float)
        one = self.range.missed(value) if whole else self.range
        fix = f"use {self._as(self.default)}"
        if one.most is None and one.least_itself:
            fix = f"use {self._as(one.least)} or more"
        elif one.least is None and one.most_itself and self.unit != "ranks":  # nobody has so many
            fix = f"use {self._as(one.most)} or less"
        return config_error(self.key, value, f"must be {one}", fix)

    def _as(self, value: Any) -> str:
        """Return the setting with a value; a command's own flag as it is typed."""
        return f"{self.key}={value}" if "." in self.key else f"{self.flag} {value}"


def setting(
    default: Any = MISSING,
    words: str = "",
    unit: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    positional: bool = False,
) -> Any:
    """Return a dataclass field with a sentence, a unit and a range of legal values.

    Args:
        default: MISSING if it is required.
        words: one sentence, which also explains special values.
        unit: unit of a number (`tokens`, `MiB`, `steps`).
        at_least, above: lower bound, inclusive or exclusive.
        at_most, below: upper bound, inclusive or exclusive.
        positional: a word without dashes gives it (commands only).
    """
    least, most = (at_least if above is None else above), (at_most if below is None else below)
    limits = None
    if least is not None or most is not None:
        limits = Range(least, most, above is None, below is None)
    about = {"words": words, "unit": unit, "range": limits, "positional": positional}
    return dataclasses.field(default=default, metadata=about)


def settings_of(cls: Any, prefix: str = "", top: bool = False) -> dict[str, Setting]:
    """Return dotted key -> setting of everything that a flag may set.

    Plain fields of the outermost class count only with `top` (a run's `preset` is positional).
    """
    return dict(_settings_of(cls, prefix, top))


@lru_cache
def _settings_of(cls: Any, prefix: str, top: bool) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        kind, key = hints[item.name], f"{prefix}{flag_name(item.name)}"
        if inner := section_class(kind):
            found |= _settings_of(inner, f"{key}.", False)
        elif prefix or top:
            default = item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            found[key] = Setting(key, kind, default, **item.metadata)
    return found


def section_class(kind: Any) -> Any:
    """Return the dataclass of a field's type, which may be optional; None: it is no section."""
    return next(filter(dataclasses.is_dataclass, (kind, *typing.get_args(kind))), None)


def flag_name(field: str) -> str:
    """Return the name of a field's flag: a field that is a word of Python ends in `_`."""
    return field.rstrip("_")


def field_name(flag: str) -> str:
    """Return the name of a flag's field: the inverse of `flag_name`."""
    return f"{flag}_" if iskeyword(flag) else flag


def sections_of(cls: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted name and first paragraph of every nested dataclass, in order."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if inner := section_class(hints[item.name]):
            doc = (inner.__doc__ or "").strip().split("\n\n")[0]
            yield f"{prefix}{item.name}", " ".join(doc.split())
            yield from sections_of(inner, f"{prefix}{item.name}.")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of every setting."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            found |= flatten(value, f"{prefix}{item.name}.")
        else:
            found[f"{prefix}{flag_name(item.name)}"] = value
    return found


def as_json(config: Any) -> dict[str, Any]:
    """Return every setting of a dataclass as nested JSON, by the names of their flags."""
    return dataclasses.asdict(config, dict_factory=_by_flag)


def _by_flag(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {flag_name(name): value for name, value in items}
