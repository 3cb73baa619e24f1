"""Pattern strings: one letter a layer, tiled to a depth, or cut into pipeline stages by `|`."""

from __future__ import annotations

from collections import Counter

from megacpp.errors import ConfigError, config_error

LETTERS = {
    "A": "attention",
    "M": "Mamba-3",
    "E": "mixture of experts",
    "R": "M2RNN",
    "F": "dense feed-forward",
}


def expand_pattern(pattern: str, depth: int) -> tuple[str, ...]:
    """Stages of block letters: one string per pipeline stage, `depth` letters in all.

    Without `|` the pattern is tiled by layer index (`AEM` at depth 5 is `AEMAE`, one stage).
    With `|` it must spell exactly `depth` letters and no stage may be empty.

    Raises:
        ConfigError: an unknown letter, an empty pattern or stage, or a wrong number of letters.
    """
    letters = pattern.upper()
    legal = ", ".join(f"{letter} ({kind})" for letter, kind in LETTERS.items())
    unknown = sorted(set(letters) - set(LETTERS) - {"|"})
    if unknown:
        raise config_error(
            "model.pattern", pattern, f"unknown letter {unknown[0]!r}", f"use letters {legal}"
        )
    if not letters.replace("|", ""):
        raise config_error("model.pattern", pattern or "''", "it has no letter", f"use {legal}")
    if depth < 1:
        raise config_error("model.depth", depth, "must be at least 1", "use depth 1 or more")
    if "|" not in letters:
        return ("".join(letters[i % len(letters)] for i in range(depth)),)
    stages = tuple(letters.split("|"))
    _check_cut(pattern, stages, depth)
    return stages


def block_letters(pattern: str, depth: int) -> str:
    """The `depth` letters of a pattern in layer order, stages joined."""
    return "".join(expand_pattern(pattern, depth))


def letter_counts(pattern: str, depth: int) -> dict[str, int]:
    """How many layers of each kind, e.g. `{'A': 13, 'E': 22, 'M': 13, 'R': 4}`."""
    counts = Counter(block_letters(pattern, depth))
    return {letter: counts[letter] for letter in LETTERS if counts[letter]}


def _check_cut(pattern: str, stages: tuple[str, ...], depth: int) -> None:
    if not all(stages):
        error: ConfigError = config_error(
            "model.pattern", pattern, "a pipeline stage is empty", "put a letter between cuts"
        )
        raise error
    total = sum(map(len, stages))
    if total != depth:
        raise config_error(
            "model.pattern",
            pattern,
            f"a pattern with '|' must spell depth letters (has {total}, model.depth={depth})",
            f"write {depth} letters or set model.depth={total}",
        )
