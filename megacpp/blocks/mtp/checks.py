"""Rules of multi-token prediction; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error


def mtp_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of `model.mtp`."""
    mtp, row = config.model.mtp, config.data.seq_len
    if mtp.depths >= row:
        yield config_error(
            "model.mtp.depths",
            mtp.depths,
            f"no token of a row is followed by so many and one more (data.seq_len={row})",
            f"use model.mtp.depths={max(0, min(2, row - 1))}",
        )
