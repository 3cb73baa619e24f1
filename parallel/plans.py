"""Plan: sharding of every parameter, and activation layouts where modules are entered and left.

One row per parameter and one per module that moves activations, in the notation of
parallel/notation.py. A parameter that a row doesn't shard over `tp` is whole on every rank of it,
but each rank has only a part of its gradient (other tokens, or other heads); the accumulation
boundary adds these up once per step. FSDP2 then shards dim 0 of every local part over the data axes
(parallel/fsdp.py), so `fsdp` is not written here.

Letters: V vocabulary, D model, O one, Z random projection, B rows, T tokens; those of a block kind
or a feature are in its descriptor (megacpp/blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from megacpp.blocks.descriptor import BlockKind, ModelFeature, always
from megacpp.blocks.features import FEATURES
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import ModelConfig
from megacpp.model.block import Block
from megacpp.model.hybrid import HybridLM
from parallel.notation import Array, Redistribute


@dataclass(frozen=True)
class Row:
    """Parameters of one kind of block.

    Attributes:
        letters: kinds of block whose mixer has them; empty: outside of all mixers.
        names: patterns of the name below the mixer (outside: of the whole name).
        array: their dims and axes.
        when: the row applies to a model.
    """

    letters: str
    names: tuple[str, ...]
    array: str
    when: Callable[[ModelConfig], bool] = always


def mixer_rows(letter: str, kind: BlockKind) -> Iterator[Row]:
    """Rows of a block kind, and of the latents of compressed layers.

    Latents (checkpointing/compress.py) are sharded as the weights' rows are.
    """
    for row in kind.parameters:
        yield Row(letter, row.names, row.dims, row.when)
        if row.compress:
            names = tuple(f"{name.removesuffix('.weight')}.latent" for name in row.names)
            yield Row(letter, names, f"[{row.dims[1:].partition(',')[0]}, Z]", row.when)


def feature_rows(feature: ModelFeature) -> Iterator[Row]:
    """Rows of a feature, which stands outside of all mixers."""
    for row in feature.parameters:
        names = tuple(feature.below + name for name in row.names)
        yield Row("", names, row.dims, feature.present)


PARAMETERS = (
    # embedding, head and the norms of the residual stream
    Row("", ("embed.weight", "head.weight"), "[V_tp, D]"),
    Row("", ("norm.weight", "blocks.*.norm.weight"), "[D]"),
    *(row for feature in FEATURES.values() for row in feature_rows(feature)),
    *(row for letter, kind in KINDS.items() for row in mixer_rows(letter, kind)),
)


BEHIND = {"attention": "A", "feed_forward": "F"}  # blocks of multi-token prediction, by name


@dataclass(frozen=True)
class ActivationRow:
    """Redistribution of activations where they enter and leave a module.

    Attributes:
        letters: kinds of block; empty: outside of all blocks.
        module: name below the mixer (outside: in the model, `*` for any layer); empty: the mixer
            itself.
        enter, leave: layouts before and after, in the notation of parallel/notation.py; None: the
            activation stays as it is.
        when: the row applies to a model.
    """

    letters: str
    module: str
    enter: str | None
    leave: str | None
    when: Callable[[ModelConfig], bool] = always


ACTIVATIONS = (
    # The residual stream is cut by token (sequence parallelism); mixers see all tokens.
    ActivationRow("", "embed", None, "x[B, T, D]{tp} -> x[B, T_tp, D]"),
    *(
        ActivationRow("", f"{one.below}{move.module}".rstrip("."), *move.ways, one.present)
        for one in FEATURES.values()
        for move in one.layouts
    ),
    *(
        ActivationRow(letter, layout.module, *layout.ways)
        for letter, kind in KINDS.items()
        for layout in kind.layouts
    ),
    ActivationRow("", "head", "x[B, T_tp, D] -> x[B, T, D]", None),
)


def row_of(model: HybridLM, name: str, table: tuple[Row, ...] = PARAMETERS) -> Array:
    """Return dims and axes of a parameter.

    Raises:
        ValueError: no row or more than one; the parameter is named.
    """
    letter, short = place(name, model.letters)
    found = [
        row
        for row in table
        if (letter in row.letters if letter else not row.letters)
        and any(fnmatchcase(short, pattern) for pattern in row.names)
        and row.when(model.config)
    ]
    if len(found) != 1:
        rows = " and ".join(row.array for row in found) or "none"
        raise ValueError(
            f"{name} must match exactly one row of the plan (matches {rows}). "
            "Fix: add it to a row of parallel/plans.py, or narrow one."
        )
    return Array.parse(found[0].array)


def spread_modules(block: nn.Module) -> list[nn.Module]:
    """Return the modules of a block whose parameters lie over `ep`: its routed experts."""
    assert isinstance(block, Block)
    rows = [row for row in KINDS[block.letter].parameters if row.dim_on("ep") is not None]
    owners = {name.rpartition(".")[0]: None for row in rows for name in row.names}
    return [block.mixer.get_submodule(owner) for owner in owners]


def place(name: str, letters: list[str] | str) -> tuple[str, str]:
    """Return the letter of the block whose mixer has a parameter, if any, and the name below it."""
    block, inside, short = name.partition(".mixer.")
    if not inside:
        return "", name
    key = block.rpartition(".")[2]
    return BEHIND[key] if key in BEHIND else letters[int(key)], short


def activation_layouts(
    model: HybridLM,
) -> Iterator[tuple[str, nn.Module, Redistribute | None, Redistribute | None]]:
    """Yield name, module, and redistributions into and out of it, by the rows of ACTIVATIONS."""
    modules = dict(model.named_modules())
    for row in ACTIVATIONS:
        for prefix in _owners(model, row):
            module = modules.get(prefix)
            if module is not None:
                yield prefix, module, _move(row.enter), _move(row.leave)


def _owners(model: HybridLM, row: ActivationRow) -> list[str]:
    if not row.letters:
        layers = model.blocks if "*" in row.module else ("",)
        return [row.module.replace("*", key) for key in layers]
    below = f".{row.module}" if row.module else ""
    mixers = model.mixers().items()
    return [f"{name}{below}" for name, (letter, _) in mixers if letter in row.letters]


def _move(text: str | None) -> Redistribute | None:
    return None if text is None else Redistribute.parse(text)
