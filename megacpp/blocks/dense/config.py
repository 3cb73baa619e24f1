"""Settings of dense feed-forward blocks (F): `model.mlp`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import WIDEST, setting


@dataclass(frozen=True)
class MLPConfig:
    """F blocks: a dense feed-forward."""

    hidden_dim: int = setting(1024, "Hidden width of F blocks.", "dims", at_least=1, at_most=WIDEST)
    activation: Literal["swiglu", "relu2"] = setting("swiglu", "Activation of F blocks.")
