"""Rules of n-gram memories; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.config import Config
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import layer_kinds

LARGEST_TABLE = 1 << 31  # a prime beyond it would take long to find


def engram_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of `model.engram` in a model whose kinds of layers are legal."""
    e = config.model.engram
    layers = [kind for kind in layer_kinds(config.model) if "+engram" in kind]
    if not layers:
        if e.layers:
            yield config_error(
                "model.engram.layers",
                e.layers,
                "model.pattern has no A block",
                "use a pattern with A, or leave it empty",
            )
        return
    least = {"heads": 1, "max_order": 2, "table_size": 2, "conv_kernel": 1, "seed": 0}
    wrong = [(name, low) for name, low in least.items() if getattr(e, name) < low]
    for name, low in wrong:
        key = f"model.engram.{name}"
        yield config_error(key, getattr(e, name), f"must be at least {low}", f"use {low} or more")
    if e.table_size > LARGEST_TABLE:
        rule = f"must be at most {LARGEST_TABLE}"
        yield config_error("model.engram.table_size", e.table_size, rule, "use smaller tables")
    if not wrong and (e.dim < 1 or e.dim % e.heads):
        above = max(1, -(-e.dim // e.heads)) * e.heads
        yield config_error(
            "model.engram.dim",
            e.dim,
            f"the tables of an order share it: model.engram.heads ({e.heads}) must divide it",
            f"use dim={above}",
        )
    if e.lr_factor < 0:
        yield config_error(
            "model.engram.lr_factor", e.lr_factor, "must be at least 0", "use 1 for embed_lr itself"
        )
