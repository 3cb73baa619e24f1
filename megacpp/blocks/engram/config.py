"""Settings of Engram memories: `model.engram`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.config.settings import WIDEST, setting


@dataclass(frozen=True)
class EngramConfig:
    """Engram: gated memories of hashed n-grams in front of some A blocks (2601.07372)."""

    layers: str = setting(
        "", 'A blocks with a memory, by rank among A blocks: "0,4" or "all" (empty: none).'
    )
    heads: int = setting(8, "Tables of each order.", "tables", at_least=1, at_most=64)
    max_order: int = setting(
        3, "Longest n-gram; orders are 2 to this one.", "tokens", at_least=2, at_most=16
    )
    table_size: int = setting(
        100_000,
        "Rows of a table: the next prime that no other table has.",
        "rows",
        at_least=2,
        at_most=1 << 31,
    )
    dim: int = setting(
        256, "Width of all tables of one order together.", "dims", at_least=1, at_most=WIDEST
    )
    conv_kernel: int = setting(
        4, "Taps of the convolution, max_order tokens apart.", "taps", at_least=1, at_most=256
    )
    seed: int = setting(0, "Seed of the hashes, which the weights depend on.", at_least=0)
    lr_factor: float = setting(
        5.0, "Learning rate of the tables over that of the embedding.", at_least=0
    )
