"""Header lines about a model beyond plain blocks; imports no torch."""

from __future__ import annotations

from megacpp.blocks.features import FEATURES
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import Config
from megacpp.model.pattern import letter_counts


def feature_lines(config: Config) -> list[str]:
    """Return lines for each enabled feature, and options of blocks; none for a plain model."""
    model = config.model
    found = [KINDS[letter].lines(config) for letter in letter_counts(model.pattern, model.depth)]
    found += [one.lines(config) for one in FEATURES.values() if one.present(model)]
    return [line for lines in found for line in lines]
