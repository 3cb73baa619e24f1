"""Settings of token order prediction: `model.top`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.config.settings import WIDEST, setting


@dataclass(frozen=True)
class TOPConfig:
    """Token order prediction: which tokens come sooner (2508.19228)."""

    loss: float = setting(0.0, "Weight of the token order loss (0: off).", at_least=0)
    window: int = setting(
        2048, "Tokens ahead that are ordered.", "tokens", at_least=1, at_most=WIDEST
    )
