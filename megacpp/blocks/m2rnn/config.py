"""Settings of M2RNN blocks (R): `model.m2rnn`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import MANY, setting


@dataclass(frozen=True)
class M2RNNConfig:
    """R blocks: M2RNN (arXiv 2603.14360)."""

    num_heads: int = setting(
        0, "Heads (0: dim // (key_dim + value_dim), at least 1).", "heads", at_least=0, at_most=MANY
    )
    num_q_heads: int = setting(
        1, "Query heads; divides the heads.", "heads", at_least=1, at_most=MANY
    )
    num_k_heads: int = setting(
        1, "Key heads; divides the heads.", "heads", at_least=1, at_most=MANY
    )
    key_dim: int = setting(
        64, "Width of a key, the rows of a state.", "dims", at_least=1, at_most=MANY
    )
    value_dim: int = setting(
        16, "Width of a value, the columns of a state.", "dims", at_least=1, at_most=MANY
    )
    conv_kernel: int = setting(4, "Taps of the short convolution.", "taps", at_least=1, at_most=256)
    gradient_clip: float | None = setting(
        1.0, "Bound on each entry of the state's gradient (none: off).", above=0
    )
    clip_mode: Literal["total", "carried"] = setting(
        "carried", "Clip the carried gradient, or the total one as upstream's torch code does."
    )
    chunk_size: int = setting(
        64, "Tokens of a chunk of the recurrence.", "tokens", at_least=1, at_most=1 << 20
    )
