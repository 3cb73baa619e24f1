"""Settings of hyper-connections: `model.mhc`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import setting


@dataclass(frozen=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections: several residual streams (mHC, 2512.24880)."""

    streams: int = setting(1, "Residual streams (1: off).", "streams", at_least=1, at_most=16)
    ordering: Literal["paper", "deepseek_v4", "megatron"] = setting(
        "paper", "Source whose order of operations is followed."
    )
    iterations: int = setting(
        20,
        "Sinkhorn iterations that make rows and columns sum to one.",
        "iterations",
        at_least=1,
        at_most=100,
    )
    init: Literal["plain", "published"] = setting(
        "plain", "plain: step 0 computes the model without streams; published: as the source."
    )
    collapse: Literal["mean", "sum"] = setting(
        "mean", "How streams become one behind the last block."
    )
