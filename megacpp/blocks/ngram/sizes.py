"""Sizes of the tables of hashed n-grams, counted from the settings; no torch import here."""

from __future__ import annotations

from megacpp.blocks.ngram.config import NgramConfig
from megacpp.model.primes import primes_from

ROWS_MULTIPLE = 256  # of all tables together, so that usual numbers of ranks divide them


def ngram_primes(ngram: NgramConfig) -> tuple[int, ...]:
    """Rows of each n-gram table: all of order 2, then all of order 3, ..."""
    return primes_from(ngram.table_size, ngram.heads * (ngram.max_order - 1))


def ngram_rows(ngram: NgramConfig) -> int:
    """Rows of all n-gram tables together, rounded up so that usual numbers of ranks divide them."""
    return -(-sum(ngram_primes(ngram)) // ROWS_MULTIPLE) * ROWS_MULTIPLE


def ngram_width(ngram: NgramConfig) -> int:
    """Numbers that all n-gram tables have for a token."""
    return ngram.heads * (ngram.max_order - 1) * ngram.dim
