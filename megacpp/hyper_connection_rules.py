"""Rules of hyper-connections (`model.mhc`); no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.config import Config
from megacpp.errors import ConfigError, config_error


def hyper_connection_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken one; none of a model with one stream."""
    mhc = config.model.mhc
    if mhc.streams < 1:
        yield config_error(
            "model.mhc.streams", mhc.streams, "must be at least 1 (off)", "use 4, or 1"
        )
    if mhc.streams > 1 and mhc.iterations < 1:
        yield config_error(
            "model.mhc.iterations",
            mhc.iterations,
            "nothing would make rows and columns sum to one",
            "use model.mhc.iterations=20",
        )
