"""Pattern strings: one letter a layer, tiled to a depth, or cut into pipeline stages by `|`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megacpp.blocks.attention.config import layer_settings
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import primes_from

LETTERS = {letter: kind.name for letter, kind in KINDS.items()}


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
    """Return the `depth` letters of a pattern in layer order, stages joined."""
    return "".join(expand_pattern(pattern, depth))


def layer_kinds(model: ModelConfig) -> list[str]:
    """Return the kind of each layer: its letter, and for A blocks their variant.

    Layers of one kind have the same parameters and run the same code:

        A            attention to all keys, or to those of the window
        A+full       to all keys, where others have a window
        A.index      to those that an indexer of its own chooses
        A.share      to those that the last A.index before it chose
        ...+engram   with an n-gram memory in front

    Raises:
        ConfigError: the pattern is broken, or a setting names an A block that doesn't exist.
    """
    kinds = list(block_letters(model.pattern, model.depth))
    places = [i for i, letter in enumerate(kinds) if letter == "A"]
    sparse, full = model.attention.sparse, model.attention.full_layers
    for rank in named_ranks("model.attention.full_layers", full, len(places)):
        kinds[places[rank]] += "+full"
    chosen = named_ranks("model.attention.sparse.layers", sparse.layers, len(places))
    own = named_ranks("model.attention.sparse.own", sparse.own, len(places))
    for number, rank in enumerate(chosen):
        chooses = number % max(1, sparse.share) == 0 or rank in own
        kinds[places[rank]] = "A.index" if chooses else "A.share"
    for rank in named_ranks("model.engram.layers", model.engram.layers, len(places)):
        kinds[places[rank]] += "+engram"
    return kinds


def warms_up(model: ModelConfig) -> bool:
    """Return whether a model's indexers alone are trained, and all keys are attended to."""
    sparse = model.attention.sparse
    return bool(sparse.layers.strip()) and sparse.stage == "dense"


def warmed_up(model: ModelConfig) -> ModelConfig:
    """Return a model after the warm-up of its indexers: attention to the keys that they choose."""
    sparse = replace(model.attention.sparse, stage="sparse")
    return replace(model, attention=replace(model.attention, sparse=sparse))


def masked(kind: str, warms_up: bool = False) -> bool:
    """Return whether a part attends to all keys; sparse layers make masks of their own.

    Args:
        kind: of the layer.
        warms_up: sparse layers attend to all keys, too.
    """
    return kind.partition("+")[0] in ("A", "mtp") or (warms_up and kind[:2] == "A.")


def choosing_layer(kinds: Sequence[str], layer: int) -> int:
    """Return the layer whose choice of keys a sparse layer uses: the last indexer up to it."""
    return next(i for i in range(layer, -1, -1) if "A.index" in kinds[i])


def choice_across(model: ModelConfig, layer: int) -> int | None:
    """Return the layer before `layer` whose choice of keys layers from `layer` on use, if any.

    There is one at most: a layer that shares takes the last choice before it.
    """
    if model.attention.sparse.stage == "dense":
        return None  # nothing is chosen
    kinds = layer_kinds(model)
    following = [i for i in range(layer, len(kinds)) if kinds[i].startswith("A.")]
    source = choosing_layer(kinds, following[0]) if following else layer
    return source if source < layer else None


ENTRANCE = ("embed", "ngram", "spread")  # modules in front of the first block, in order
EXIT = ("collapse", "norm", "top", "mtp", "head")  # and behind the last


def with_kinds(model: ModelConfig, kinds: Sequence[str]) -> ModelConfig:
    """Return the model with layers of other kinds; the first sparse one must choose keys."""
    ranked = [kind for kind in kinds if kind[0] == "A"]

    def ranks(wanted: str) -> str:
        return ",".join(str(rank) for rank, kind in enumerate(ranked) if wanted in kind)

    sparse = replace(
        model.attention.sparse, layers=ranks("A."), own=ranks("A.index"), share=len(kinds)
    )
    return replace(
        model,
        depth=len(kinds),
        pattern="".join(kind[0] for kind in kinds),
        attention=replace(model.attention, sparse=sparse, full_layers=ranks("+full")),
        engram=replace(
            model.engram, layers=ranks("+engram"), table_size=_first_table(model, kinds)
        ),
    )


def _first_table(model: ModelConfig, kinds: Sequence[str]) -> int:
    """Return the table size from which fewer memories end with as many rows as the model's."""
    e = model.engram
    if not any("+engram" in kind for kind in kinds):
        return e.table_size
    fewer = sum("+engram" in kind for kind in layer_kinds(model))
    fewer -= sum("+engram" in kind for kind in kinds)
    return primes_from(e.table_size, max(0, fewer) * e.heads * (e.max_order - 1) + 1)[-1]


def layer_model(model: ModelConfig, kind: str) -> ModelConfig:
    """Return the model's settings as a layer of a kind reads them."""
    return replace(model, attention=layer_settings(model.attention, kind))


def named_ranks(key: str, text: str, count: int) -> list[int]:
    """Ranks of A blocks as a setting names them, in order: `""`, `"all"`, `"every:4"`, `"1,2,3"`.

    Raises:
        ConfigError: no number, or no such A block.
    """
    words = text.strip()
    every = words.removeprefix("every:")
    if words == "all":
        found = list(range(count))
    elif every != words and every.isdecimal() and int(every):
        found = list(range(int(every) - 1, count, int(every)))
    else:
        try:
            found = sorted({int(part) for part in words.split(",") if part.strip()})
        except ValueError:
            raise config_error(
                key, text, "ranks of A blocks are numbers", "write 0,2,3 or every:4 or all"
            ) from None
    if words and not count:
        rule = "the model has no A block"
        raise config_error(key, text, rule, "use a pattern with A, or leave it empty")
    if words and not found:
        rule = f"names none of the model's {count} A blocks"
        raise config_error(key, text, rule, f"use {key}=every:{count}, or leave it empty")
    if found and not 0 <= found[0] <= found[-1] < count:
        raise config_error(
            key, text, f"the model has {count} A blocks, ranks 0 to {count - 1}", "name those"
        )
    return found


def letter_counts(pattern: str, depth: int) -> dict[str, int]:
    """Return the number of layers by letter, e.g. `{'A': 13, 'E': 22, 'M': 13, 'R': 4}`."""
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
