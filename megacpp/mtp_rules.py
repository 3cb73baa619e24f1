"""Rules of multi-token prediction; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.config import Config
from megacpp.errors import ConfigError, config_error


def mtp_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of `model.mtp`."""
    mtp, row = config.model.mtp, config.data.seq_len
    if mtp.depths < 0:
        yield config_error("model.mtp.depths", mtp.depths, "must be 0 (off) or more", "use 0")
    if mtp.depths <= 0:
        return
    if mtp.depths >= row:
        yield config_error(
            "model.mtp.depths",
            mtp.depths,
            f"no token of a row is followed by so many and one more (data.seq_len={row})",
            f"use model.mtp.depths={max(0, min(2, row - 1))}",
        )
    for name in ("loss", "loss_final"):
        if getattr(mtp, name) < 0:
            key = f"model.mtp.{name}"
            yield config_error(key, getattr(mtp, name), "must be 0 or more", f"use {key}=0.3")
    if not 0 <= mtp.switch <= 1:
        yield config_error(
            "model.mtp.switch", mtp.switch, "is a part of run.steps, 0 to 1", "use 1 for never"
        )
    if mtp.beta <= 0:
        yield config_error("model.mtp.beta", mtp.beta, "must be above 0", "use 1: all depths alike")
    if mtp.hidden_dim < 0:
        yield config_error(
            "model.mtp.hidden_dim", mtp.hidden_dim, "must be 0 (four times dim) or more", "use 0"
        )
