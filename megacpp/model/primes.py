"""Primes for the sizes of hash tables; no torch here."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=64)
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are not below `least`, in order."""
    found: list[int] = []
    number = max(2, least)
    while len(found) < count:
        if is_prime(number):
            found.append(number)
        number += 1
    return tuple(found)


def is_prime(number: int) -> bool:
    """By trial division: sizes of tables are far below what that would be slow for."""
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % d for d in range(3, int(number**0.5) + 2, 2))
