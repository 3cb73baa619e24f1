"""Rule that a mesh breaks; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """Rule that a mesh breaks.

    Attributes:
        key, value: field of `MeshConfig` and its value.
        rule: the rule, for the error message.
        axes: axes of which another degree may mend it, best first.
        otherwise: another fix, in words.
        ranks: size of a world that may mend it.
    """

    key: str
    value: object
    rule: str
    axes: tuple[str, ...] = ()
    otherwise: str = ""
    ranks: int = 0
