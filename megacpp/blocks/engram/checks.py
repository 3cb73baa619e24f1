"""Rules of n-gram memories; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import layer_kinds


def engram_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of `model.engram` in a model whose kinds of layers are legal."""
    e = config.model.engram
    if any("+engram" in kind for kind in layer_kinds(config.model)) and e.dim % e.heads:
        above = -(-e.dim // e.heads) * e.heads
        yield config_error(
            "model.engram.dim",
            e.dim,
            f"the tables of an order share it: model.engram.heads ({e.heads}) must divide it",
            f"use {above}",
        )
