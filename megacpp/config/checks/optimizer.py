"""Layers that AdamW updates by name, and rules of the optimizer's rates; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megacpp.blocks.features import ahead_blocks
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error


def layer_of(parameter: str) -> str:
    """Return the name of the layer that has a parameter: `wo` of `blocks.0.mixer.wo.weight`."""
    return parameter.removesuffix(".weight").rpartition(".")[2]


@lru_cache(maxsize=64)
def adamw_layers(names: str) -> frozenset[str]:
    """Return the layers that `optim.adamw_layers` names."""
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def optimizer_rules(config: Config) -> Iterator[ConfigError]:
    """Yield an error of rates that learn nothing, or of a layer that Muon wouldn't update."""
    optim, model = config.optim, config.model
    if optim.lr == 0 and (optim.name == "adamw" or optim.muon_lr == 0):
        yield config_error("optim.lr", 0, "nothing would be learned", "give a positive rate")
    letters = set(model.pattern.upper()) & set(KINDS)
    letters.update(*(blocks.letters for blocks in ahead_blocks(model)))
    known = {
        layer_of(name)
        for letter in letters
        for name, _, row in KINDS[letter].shapes(model)
        if row.group == "muon"
    }
    if unknown := sorted(adamw_layers(optim.adamw_layers) - known):
        yield config_error(
            "optim.adamw_layers",
            unknown[0],
            "no block of the model has such a layer that Muon updates",
            f"use some of {','.join(sorted(known))}",
        )
