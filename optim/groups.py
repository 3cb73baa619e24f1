"""Parameter groups: one table assigns each parameter to Muon or AdamW, by exactly one row.

Muon updates the matrices between hidden states. AdamW updates embedding and head, vectors and
scalars, filters, and the projections to one number per head (dt, A, trap, angles, forget) or per
stream: a few rows that are orthogonalised alone are nearly their normalised gradient. An indexer
belongs to AdamW as well: it learns from a loss of its own, whose published rates are AdamW's. A
weight that is updated through a latent (optim/compressed.py) is in its row but has no state; the
latent belongs to AdamW. Where one parameter holds several matrices, each is orthogonalised alone:
one matrix for all would trade singular values between them. Projections that the model stores
separately are one matrix each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Literal

from torch import nn

from megacpp.blocks.descriptor import Parameter, Rate
from megacpp.blocks.features import FEATURES
from megacpp.blocks.kinds import KINDS
from megacpp.config.checks.optimizer import layer_of
from megacpp.config.schema import ModelConfig, OptimConfig
from megacpp.errors import ConfigError
from megacpp.model.block import Block
from megacpp.model.hybrid import HybridLM
from optim.compressed import LowRankUpdate, has_latent
from optim.ownership import MatrixView

Algorithm = Literal["muon", "adamw", "fold"]
View = Callable[[ModelConfig], MatrixView]


@dataclass(frozen=True)
class OptimizerRow:
    """Line of the parameter table.

    Attributes:
        letters: kinds of block whose mixer has the parameter; empty: outside all mixers.
        names: patterns of its name below the mixer (outside: of its whole name).
        algorithm: `muon` or `adamw`.
        decays: weight decay applies.
        view: Muon's matrices, from a model's settings.
        rate: the setting of `OptimConfig` that is the peak learning rate under AdamW, where 0 means
            `lr`; under Muon it is `muon_lr`.
        lr_factor: of that rate, for this row alone; `factor`: the same, from a model's settings.
    """

    letters: str
    names: tuple[str, ...]
    algorithm: Algorithm
    decays: bool
    view: View = lambda model: MatrixView()
    rate: Rate = "lr"
    lr_factor: float = 1.0
    factor: Callable[[ModelConfig], float] = lambda model: 1.0

    def matches(self, letter: str, name: str) -> bool:
        """Return whether the row covers `name` in a mixer of this letter ("" outside mixers)."""
        inside = letter in self.letters if letter else not self.letters
        return inside and any(fnmatchcase(name, pattern) for pattern in self.names)


def each_expert(model: ModelConfig) -> MatrixView:
    """Make each expert a matrix."""
    return MatrixView(batched=True)


def whole(model: ModelConfig) -> MatrixView:
    """Make the parameter one matrix."""
    return MatrixView()


def stacked(rows: Callable[[ModelConfig], tuple[int, ...]]) -> View:
    """Return a view of matrices with `rows(model)` rows each."""
    return lambda model: MatrixView(rows(model))


def rows_of(
    parameters: Sequence[Parameter], letter: str = "", below: str = ""
) -> Iterator[OptimizerRow]:
    """Yield rows of a block kind or a feature; parameters that are moved alike share one.

    Args:
        parameters: of its descriptor.
        letter: of the kind; empty: a feature, outside of mixers.
        below: beginning of a feature's names.
    """

    def alike(row: Parameter) -> tuple[object, ...]:
        return row.group, row.decay, row.rows, row.rate, row.factor, len(row.letters) == 3

    for key in dict.fromkeys(map(alike, parameters)):
        rows = [row for row in parameters if alike(row) == key]
        names = tuple(dict.fromkeys(below + name for row in rows for name in row.names))
        first = rows[0]
        if first.group == "vector":
            yield vectors(letter, *names)
            continue
        view = whole
        if first.group == "muon":
            view = each_expert if len(first.letters) == 3 else whole
            view = stacked(first.rows) if first.rows else view
        yield OptimizerRow(
            letter, names, first.group, first.decay, view, first.rate, factor=first.factor
        )


def vectors(letters: str, *names: str) -> OptimizerRow:
    """Return a row for norms, biases, and numbers per head or channel."""
    return OptimizerRow(letters, names, "adamw", False, rate="vector_lr")


TABLE = (
    OptimizerRow("", ("embed.weight",), "adamw", True, rate="embed_lr"),
    OptimizerRow("", ("head.weight",), "adamw", True, rate="head_lr"),
    vectors("", "norm.weight", "blocks.*.norm.weight"),
    *(row for one in FEATURES.values() for row in rows_of(one.parameters, below=one.below)),
    *(row for kind in KINDS.values() for row in rows_of(kind.parameters, kind.letter)),
    *(OptimizerRow(letter, ("*.latent",), "adamw", True) for letter in KINDS),
)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Parameter with the table row that covers it.

    Attributes:
        algorithm: `fold` for a weight that is updated through its latent.
        fold: for a latent, its low-rank update.
        factor: factor of the learning rate, from the model's settings.
    """

    name: str
    parameter: nn.Parameter
    row: OptimizerRow
    algorithm: Algorithm
    view: MatrixView
    fold: LowRankUpdate | None = None
    factor: float = 1.0

    def lr(self, config: OptimConfig) -> float:
        """Return the peak learning rate."""
        factor = self.row.lr_factor * self.factor
        if self.algorithm == "muon":
            return config.muon_lr * factor
        return (getattr(config, self.row.rate) or config.lr) * factor

    def decay(self, config: OptimConfig) -> float:
        """Return the weight decay."""
        decay = config.muon_weight_decay if self.algorithm == "muon" else config.weight_decay
        return decay if self.row.decays else 0.0


def assign(
    model: HybridLM,
    algorithm: Literal["muon_adamw", "adamw"],
    table: tuple[OptimizerRow, ...] = TABLE,
    by_adamw: frozenset[str] = frozenset(),
) -> list[Assignment]:
    """Return the row of every parameter; with `adamw` alone, Muon's rows use AdamW too.

    Args:
        model: on the meta device or not.
        algorithm: optimizer of Muon's rows.
        table: rows, of which each parameter matches one.
        by_adamw: names of layers of Muon's rows that use AdamW (`optim.adamw_layers`).

    Raises:
        ConfigError: a parameter matches no row, or several; the error names it.
    """
    return list(_assignments(model, algorithm, table, by_adamw))


def table_lines(assignments: list[Assignment], config: OptimConfig) -> list[str]:
    """Return the table for a model, one line per row, algorithm and shape of its matrices."""

    def key(a: Assignment) -> tuple[int, str, str]:
        return rows[id(a.row)], a.algorithm, str(a.view)

    rows: dict[int, int] = {}
    for a in assignments:
        rows.setdefault(id(a.row), len(rows))
    lines = []
    for (_, _, view), same in groupby(sorted(assignments, key=key), key):
        members = list(same)
        row = members[0].row
        what = " ".join((f"{row.letters}:" if row.letters else "outside:", *row.names))
        numel = sum(a.parameter.numel() for a in members)
        rule = view if members[0].algorithm == "muon" else ""
        decays = "decay" if row.decays else "-"
        lines.append(
            f"{members[0].algorithm:5} lr {members[0].lr(config):<7g} {decays:5} "
            f"{len(members):4} tensors {numel:>13,}  {what}" + (f"  [{rule}]" if rule else "")
        )
    return lines


def _assignments(
    model: HybridLM,
    algorithm: Literal["muon_adamw", "adamw"],
    table: tuple[OptimizerRow, ...],
    by_adamw: frozenset[str],
) -> Iterator[Assignment]:
    for name, parameter in model.named_parameters():
        letter, short = _place(model, name)
        rows = [row for row in table if row.matches(letter, short)]
        if len(rows) != 1:
            found = " and ".join(str(row.names) for row in rows) or "none"
            raise ConfigError(
                f"optim.groups={name}: must match exactly one row of the table (matches {found}). "
                "Fix: add it to a row of optim/groups.py, or narrow one."
            )
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        if has_latent(layer):
            is_latent = leaf == "latent"
            of_it = LowRankUpdate.of_layer(layer) if is_latent else None
            moved: Algorithm = "adamw" if is_latent else "fold"
            yield Assignment(name, parameter, rows[0], moved, MatrixView(), of_it)
            continue
        muon = algorithm == "muon_adamw" and rows[0].algorithm == "muon"
        muon = muon and layer_of(name) not in by_adamw
        view = rows[0].view(model.config) if muon else MatrixView()
        by: Algorithm = "muon" if muon else "adamw"
        factor = rows[0].factor(model.config)
        yield Assignment(name, parameter, rows[0], by, view, factor=factor)


def _place(model: HybridLM, name: str) -> tuple[str, str]:
    """Return the letter of the block that owns a parameter (empty: none), and its name below."""
    owner, inside, short = name.partition(".mixer.")
    if inside:
        block = model.get_submodule(owner)
        assert isinstance(block, Block)
        return block.letter, short
    return "", name
