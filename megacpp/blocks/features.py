"""Features by their section of `ModelConfig`; no torch import here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megacpp.blocks.descriptor import AheadBlocks, ModelFeature
from megacpp.blocks.engram.descriptor import ENGRAM
from megacpp.blocks.hyper_connections.descriptor import HYPER_CONNECTIONS
from megacpp.blocks.mtp.descriptor import MTP
from megacpp.blocks.ngram.descriptor import NGRAM
from megacpp.blocks.top.descriptor import TOP
from megacpp.config.model import ModelConfig
from megacpp.model.pattern import ENTRANCE, EXIT, block_letters

FEATURES: Mapping[str, ModelFeature] = MappingProxyType(
    {feature.name: feature for feature in (MTP, TOP, NGRAM, ENGRAM, HYPER_CONNECTIONS)}
)


def mixer_letters(model: ModelConfig) -> set[str]:
    """Return the letters of a model's mixers: those of its layers, and of its features' blocks.

    Raises:
        ConfigError: the pattern is broken.
    """
    found = set(block_letters(model.pattern, model.depth))
    return found.union(*(blocks.alike for blocks in ahead_blocks(model)))


def ahead_blocks(model: ModelConfig) -> list[AheadBlocks]:
    """Return the blocks behind a model's last layer, by feature."""
    had = (one.ahead(model) for one in FEATURES.values() if one.present(model))
    return [blocks for blocks in had if blocks is not None]


def tokens_ahead(model: ModelConfig) -> int:
    """Return how many tokens beyond the next a model is trained to predict."""
    return sum(blocks.passes for blocks in ahead_blocks(model))


def entrance(model: ModelConfig) -> tuple[str, ...]:
    """Return the names in ENTRANCE that a model has."""
    return _had(ENTRANCE, model)


def exit_parts(model: ModelConfig) -> tuple[str, ...]:
    """Return the names in EXIT that a model has."""
    return _had(EXIT, model)


def _had(names: tuple[str, ...], model: ModelConfig) -> tuple[str, ...]:
    lacks = {part for one in FEATURES.values() if not one.present(model) for part in one.around}
    return tuple(name for name in names if name not in lacks)
