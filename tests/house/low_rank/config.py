"""Settings of low-rank blocks (Z): `model.low_rank`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.config.settings import setting


@dataclass(frozen=True)
class LowRankConfig:
    """Z blocks: a feed-forward through a narrow layer."""

    rank: int = setting(32, "Width of the narrow layer.", "dims", at_least=1, at_most=1 << 16)
