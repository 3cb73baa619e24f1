"""Settings of Mamba-3 blocks (M): `model.mamba3`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import MANY, WIDEST, setting


@dataclass(frozen=True)
class Mamba3Config:
    """M blocks: Mamba-3 (arXiv 2603.15569), SISO when mimo_rank is 1."""

    d_state: int = setting(64, "State size; a multiple of 4.", "dims", at_least=4, at_most=MANY)
    expand: int = setting(2, "Inner width over the model's width.", at_least=1, at_most=64)
    headdim: int = setting(
        64, "Width of a head; divides expand * dim.", "dims", at_least=1, at_most=WIDEST
    )
    ngroups: int = setting(
        1,
        "Groups of heads with B and C in common; divides the heads.",
        "groups",
        at_least=1,
        at_most=MANY,
    )
    mimo_rank: int = setting(1, "Rank of the MIMO update (1: SISO).", at_least=1, at_most=256)
    rope_fraction: float = setting(0.5, "Rotated part of the state: 0.5 or 1.", above=0, at_most=1)
    a_activation: Literal["heavy_tail", "softplus"] = setting(
        "heavy_tail", "Function that makes the decay A from its projection."
    )
    a_floor: float = setting(1e-4, "Smallest absolute value of A.", above=0)
    out_norm: bool = setting(False, "Normalise the output before its projection.")
    conv_kernel: int = setting(
        0,
        "Taps of a short convolution on x, B and C (0: none, as in the paper).",
        "taps",
        at_least=0,
        at_most=256,
    )
    chunk_size: int = setting(
        64, "Tokens of a chunk of the scan.", "tokens", at_least=1, at_most=1 << 20
    )
    dt_min: float = setting(1e-3, "Smallest step size at the start; at most dt_max.", above=0)
    dt_max: float = setting(0.1, "Largest step size at the start.", above=0)
    dt_init_floor: float = setting(1e-4, "Floor of step sizes at the start.", above=0)
