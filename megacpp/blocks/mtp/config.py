"""Settings of multi-token prediction: `model.mtp`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import WIDEST, setting


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction: further tokens from the last hidden states (2412.19437)."""

    depths: int = setting(
        0, "Tokens predicted beyond the next (0: off).", "tokens", at_least=0, at_most=64
    )
    shared: bool = setting(True, "Use one block for all depths (FastMTP, 2509.18362).")
    loss: float = setting(0.3, "Weight of the mean over depths.", at_least=0)
    loss_final: float = setting(0.3, "Weight after `switch`.", at_least=0)
    switch: float = setting(
        1.0, "Part of run.steps after which loss_final takes over.", at_least=0, at_most=1
    )
    beta: float = setting(0.6, "Depth k weighs beta^k, normalised (1: all alike).", above=0)
    order: Literal["embedding_hidden", "hidden_embedding"] = setting(
        "embedding_hidden", "Order of the two halves that a depth projects."
    )
    hidden: Literal["pre_norm", "post_norm"] = setting(
        "pre_norm", "Hidden states of trunk and depths, before or after their norm."
    )
    hidden_dim: int = setting(
        0,
        "Hidden width of the block's feed-forward (0: 4 * dim, two thirds with SwiGLU).",
        "dims",
        at_least=0,
        at_most=WIDEST,
    )
    detach_trunk: bool = setting(False, "Send no gradient of this loss into the trunk.")
    detach_head: bool = setting(False, "Send no gradient of this loss into the head.")
