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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Literal

from torch import nn

from megacpp.blocks.attention.mla import MultiHeadLatentAttention
from megacpp.blocks.m2rnn.module import M2RNN
from megacpp.config.schema import ModelConfig, OptimConfig
from megacpp.errors import ConfigError
from megacpp.model.block import Block
from megacpp.model.hybrid import HybridLM
from optim.compressed import LowRankUpdate, has_latent
from optim.ownership import MatrixView

Algorithm = Literal["muon", "adamw", "fold"]
Rate = Literal["lr", "embed_lr", "head_lr", "vector_lr"]
View = Callable[[nn.Module], MatrixView]


@dataclass(frozen=True)
class Row:
    """Line of the parameter table.

    Attributes:
        letters: kinds of block whose mixer has the parameter; empty: outside all mixers.
        names: patterns of its name below the mixer (outside: of its whole name).
        algorithm: `muon` or `adamw`.
        decays: weight decay applies.
        view: division into matrices for Muon, from the mixer that owns the parameter.
        rate: setting of `OptimConfig` with the peak learning rate under AdamW, where 0 means `lr`;
            Muon uses `muon_lr`.
        lr_factor: factor of that rate, for this row alone.
        factor: further factor, from the model's settings.
    """

    letters: str
    names: tuple[str, ...]
    algorithm: Algorithm
    decays: bool
    view: View = lambda mixer: MatrixView()
    rate: Rate = "lr"
    lr_factor: float = 1.0
    factor: Callable[[ModelConfig], float] = lambda model: 1.0

    def matches(self, letter: str, name: str) -> bool:
        """Return whether the row covers `name` in a mixer of this letter ("" outside mixers)."""
        inside = letter in self.letters if letter else not self.letters
        return inside and any(fnmatchcase(name, pattern) for pattern in self.names)


def rows_by_head(projection: str, head_rows: str) -> View:
    """Return a view that makes each head of an M2RNN projection a matrix of `head_rows` rows."""

    def view(mixer: nn.Module) -> MatrixView:
        assert isinstance(mixer, M2RNN)
        height = getattr(mixer, head_rows)
        rows = getattr(mixer, projection).weight.shape[0]
        return MatrixView((height,) * (rows // height))

    return view


def latent_rows(mixer: nn.Module) -> MatrixView:
    """Divide MLA's down-projection into the latent and the rotary key that all heads share."""
    assert isinstance(mixer, MultiHeadLatentAttention)
    return MatrixView((mixer.latent_dim, mixer.rope_dim))


def key_value_rows(mixer: nn.Module) -> MatrixView:
    """Divide MLA's up-projection into k and v of every head in turn."""
    assert isinstance(mixer, MultiHeadLatentAttention)
    heads = mixer.config.attention.num_heads
    return MatrixView((mixer.nope_dim, mixer.value_dim) * heads)


def stream_rows(model: nn.Module) -> MatrixView:
    """Divide Engram's key projection into one matrix per residual stream."""
    assert isinstance(model, HybridLM)
    streams = model.config.mhc.streams
    return MatrixView((model.config.dim,) * streams) if streams > 1 else MatrixView()


def experts(mixer: nn.Module) -> MatrixView:
    """Make each expert a matrix."""
    return MatrixView(batched=True)


def ngram_factor(model: ModelConfig) -> float:
    """Return the learning rate factor of n-gram tables."""
    return model.ngram.lr_factor


def memory_factor(model: ModelConfig) -> float:
    """Return the learning rate factor of Engram tables."""
    return model.engram.lr_factor


def vectors(letters: str, *names: str) -> Row:
    """Return a row for norms, biases, and numbers per head or channel."""
    return Row(letters, names, "adamw", False, rate="vector_lr")


TABLE = (
    Row("", ("embed.weight",), "adamw", True, rate="embed_lr"),
    Row("", ("head.weight", "top.unembed.weight"), "adamw", True, rate="head_lr"),
    # Most rows of a table are rarely read: large steps, and no decay between two of them.
    Row("", ("ngram.tables.weight",), "adamw", False, rate="embed_lr", factor=ngram_factor),
    Row(
        "",
        ("blocks.*.engram.tables.weight",),
        "adamw",
        False,
        rate="embed_lr",
        factor=memory_factor,
    ),
    Row("", ("ngram.proj.weight", "mtp.blocks.*.projection.weight"), "muon", True),
    Row("", ("blocks.*.engram.wk.weight",), "muon", True, stream_rows),
    Row("", ("blocks.*.engram.wv.weight",), "muon", True),
    Row("", ("blocks.*.engram.conv.weight",), "adamw", False),
    vectors("", "blocks.*.engram.w[kv].bias", "blocks.*.engram.*_norm.weight"),
    vectors("", "norm.weight", "blocks.*.norm.weight", "mtp.blocks.*norm.weight"),
    Row("", ("blocks.*.connection.phi",), "adamw", True),  # to a few numbers of a token
    vectors("", "blocks.*.connection.scale", "blocks.*.connection.bias"),
    Row("A", ("wq.weight", "wk.weight", "wv.weight", "wo.weight"), "muon", True),
    Row("A", ("wq_a.weight", "wq_b.weight"), "muon", True),
    Row("A", ("wkv_a.weight",), "muon", True, latent_rows),
    Row("A", ("wkv_b.weight",), "muon", True, key_value_rows),
    vectors("A", "q_norm.weight", "k_norm.weight", "kv_norm.weight"),
    Row("A", ("indexer.wq_b.weight", "indexer.wk.weight"), "adamw", True),
    Row("A", ("indexer.weights_proj.weight",), "adamw", True),
    vectors("A", "indexer.k_norm.weight", "indexer.k_norm.bias"),
    Row("M", ("in_[zxBC].weight", "out_proj.weight"), "muon", True),
    Row("M", ("in_dt.weight", "in_A.weight", "in_trap.weight", "in_angles.weight"), "adamw", True),
    vectors("M", "B_norm.weight", "C_norm.weight", "norm.weight"),
    vectors("M", "dt_bias", "B_bias", "C_bias", "D"),
    Row("M", ("mimo_[xzo]",), "adamw", False),
    Row("E", ("experts.w[123]",), "muon", True, experts),
    Row("E", ("shared.w[123].weight",), "muon", True),
    Row("E", ("router.weight", "shared.gate.weight"), "adamw", True),
    Row("R", ("in_q.weight",), "muon", True, rows_by_head("in_q", "key_dim")),
    Row("R", ("in_k.weight",), "muon", True, rows_by_head("in_k", "key_dim")),
    Row("R", ("in_v.weight",), "muon", True, rows_by_head("in_v", "value_dim")),
    Row("R", ("in_gate.weight", "output_projection.weight"), "muon", True),
    Row("R", ("in_forget.weight",), "adamw", True),
    vectors("R", "g_norm.weight", "D", "decay_gate.A_log", "decay_gate.dt_bias"),
    Row("R", ("state_weight",), "adamw", False),
    Row("MR", ("conv_?.weight",), "adamw", False),
    Row("F", ("w[123].weight",), "muon", True),
    Row("AF", ("*.latent",), "adamw", True),
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
    row: Row
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
    model: HybridLM, algorithm: Literal["muon_adamw", "adamw"], table: tuple[Row, ...] = TABLE
) -> list[Assignment]:
    """Return the row of every parameter; with `adamw` alone, Muon's rows use AdamW too.

    Raises:
        ConfigError: a parameter matches no row, or several; the error names it.
    """
    return list(_assignments(model, algorithm, table))


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
    model: HybridLM, algorithm: Literal["muon_adamw", "adamw"], table: tuple[Row, ...]
) -> Iterator[Assignment]:
    for name, parameter in model.named_parameters():
        letter, mixer, short = _place(model, name)
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
        view = rows[0].view(mixer) if muon else MatrixView()
        by: Algorithm = "muon" if muon else "adamw"
        factor = rows[0].factor(model.config)
        yield Assignment(name, parameter, rows[0], by, view, factor=factor)


def _place(model: HybridLM, name: str) -> tuple[str, nn.Module, str]:
    """Return the letter and the mixer that own a parameter, and its name below the mixer."""
    owner, inside, short = name.partition(".mixer.")
    if inside:
        block = model.get_submodule(owner)
        assert isinstance(block, Block)
        return block.letter, block.mixer, short
    return "", model, name
