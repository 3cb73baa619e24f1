"""Parameter counts, total and active per token, from the configuration; no torch import here.

tests/model/test_stages.py holds them together with the model on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import LETTERS, block_letters
from megacpp.model.sizes import (
    ahead_parameters,
    embedding_parameters,
    idle_parameters,
    layer_parameters,
)

if TYPE_CHECKING:
    from megacpp.model.hybrid import HybridLM


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters; `active` leaves out the experts that a token doesn't visit."""

    total: int
    active: int
    by_kind: dict[str, int] = field(default_factory=dict)  # embedding, A, E, M, R, F, norm, head

    def __str__(self) -> str:
        return f"{short(self.total)} parameters, {short(self.active)} active per token"


def meta_model(config: ModelConfig) -> HybridLM:
    """Return the model without storage: shapes and names only, in milliseconds at any size."""
    import torch

    from megacpp.model.hybrid import HybridLM

    with torch.device("meta"):
        return HybridLM(config)


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of a configuration without building a model."""
    vocabulary = config.vocab_size * config.dim
    ngram = embedding_parameters(config) - vocabulary
    by_kind = {"embed": vocabulary, **({"ngram": ngram} if ngram else {})}
    letters = block_letters(config.pattern, config.depth)
    for letter, number in zip(letters, layer_parameters(config), strict=True):
        by_kind[letter] = by_kind.get(letter, 0) + number
    behind = {
        "norm": config.dim,
        "top": vocabulary if config.top.loss else 0,
        "mtp": ahead_parameters(config),
        "head": 0 if config.tie_embeddings else vocabulary,
    }
    by_kind |= {name: number for name, number in behind.items() if number}
    total = sum(by_kind.values())
    return ParameterCount(total, total - idle_parameters(config), by_kind)


def published_reading(config: ModelConfig) -> ParameterCount:
    """Count a hybrid whose M *and* R layers are Mamba-2 style mixers (arXiv 2405.21060).

    The NAM56R shapes give the published 4.73B total / 3.03B active under this reading, to 0.4 %
    (4.737B / 3.041B; the gap between the two, idle experts, agrees to every digit given):
    grouped-query attention without an MLP, mixers with z, x, B, C and dt projections, a width-4
    conv with bias over x, B, C, three numbers per head and a gated norm; layer norms as here.
    """
    ours = count_parameters(config)
    letters = block_letters(config.pattern, config.depth)
    m = config.mamba3
    inner, groups = m.expand * config.dim, m.ngroups * m.d_state
    heads, conv_width = inner // m.headdim, inner + 2 * groups
    mixer = (
        config.dim * (2 * inner + 2 * groups + heads)
        + conv_width * (4 + 1)
        + 3 * heads
        + inner
        + inner * config.dim
    )
    by_kind = dict(ours.by_kind)
    for letter in "MR":
        by_kind[letter] = letters.count(letter) * (mixer + config.dim)
    total = sum(by_kind.values())
    return ParameterCount(total, total - (ours.total - ours.active), by_kind)


def table_lines(config: ModelConfig) -> list[str]:
    """Return the lines of the model table: layers and parameters of each block kind."""
    count, letters = count_parameters(config), block_letters(config.pattern, config.depth)
    lines = [f"{count}; pattern {config.pattern} x depth {config.depth}, width {config.dim}"]
    for kind, number in count.by_kind.items():
        layers = f"{letters.count(kind):3} x {LETTERS[kind]}" if kind in LETTERS else kind
        lines.append(f"{layers:28} {number:>15,} parameters")
    return lines


def short(number: float) -> str:
    """Return a number in three digits with its unit, such as `4.73B`, `113M` or `64K`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if float(f"{number / size:.3g}") >= 1:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
