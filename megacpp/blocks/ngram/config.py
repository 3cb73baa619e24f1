"""Settings of hashed n-grams: `model.ngram`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp.config.settings import MANY, setting


@dataclass(frozen=True)
class NgramConfig:
    """Hashed n-grams, looked up and added to the token embedding; zero at the start."""

    heads: int = setting(0, "Tables of each order (0: off).", "tables", at_least=0, at_most=64)
    max_order: int = setting(
        3, "Longest n-gram; orders are 2 to this one.", "tokens", at_least=2, at_most=16
    )
    table_size: int = setting(
        500_000,
        "Rows of a table: the next prime that no other table has.",
        "rows",
        at_least=2,
        at_most=1 << 31,
    )
    dim: int = setting(16, "Width of a row of a table.", "dims", at_least=1, at_most=MANY)
    lr_factor: float = setting(
        5.0, "Learning rate of the tables over that of the embedding.", at_least=0
    )
