"""Rules between the settings of a model; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.blocks.features import FEATURES, mixer_letters
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import layer_kinds
from megacpp.model.sizes import embedding_parameters, head_parameters, layer_parameters

MOST_PARAMETERS = 10**15  # a thousand times the largest model; beyond it sizes pass 2^63


def model_rules(config: Config) -> Iterator[ConfigError]:
    """Yield broken rules of the blocks that the pattern uses; without any, of the whole model."""
    none = True
    for error in _of_blocks(config):
        none = False
        yield error
    if none:
        yield from _parameters(config)


def _parameters(config: Config) -> Iterator[ConfigError]:
    model = config.model
    total = sum(layer_parameters(model)) + embedding_parameters(model) + head_parameters(model)
    if total > MOST_PARAMETERS:
        rule = f"makes a model of {total:.1e} parameters, at most {MOST_PARAMETERS:.0e} can be"
        yield config_error("model.dim", model.dim, rule, "use smaller dims or fewer of them")


def _of_blocks(config: Config) -> Iterator[ConfigError]:
    try:
        layer_kinds(config.model)
    except ConfigError as error:
        yield error
        return
    for feature in FEATURES.values():
        yield from feature.checks(config)
    letters = mixer_letters(config.model)
    for letter, kind in KINDS.items():
        if letter in letters:
            yield from kind.checks(config)
