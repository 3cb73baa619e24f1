"""Primes for the sizes of hash tables, and divisors; no torch here."""

from __future__ import annotations

import math
from functools import lru_cache

# Miller and Rabin's test with these bases is exact below 3,215,031,751 (Pomerance, Selfridge and
# Wagstaff, Math. Comp. 35, 1980); tables have at most 2^31 rows.
BASES = (2, 3, 5, 7)


@lru_cache(maxsize=64)
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """Return the first `count` primes that are not below `least`, in order."""
    found: list[int] = []
    number = max(2, least)
    while len(found) < count:
        if is_prime(number):
            found.append(number)
        number += 1
    return tuple(found)


def is_prime(number: int) -> bool:
    """Return whether a number below 3,215,031,751 is prime."""
    if number < 2:
        return False
    for prime in BASES:
        if number % prime == 0:
            return number == prime
    twos = ((number - 1) & -(number - 1)).bit_length() - 1
    for base in BASES:
        power = pow(base, (number - 1) >> twos, number)
        if power != 1 and not any(pow(power, 1 << i, number) == number - 1 for i in range(twos)):
            return False
    return True


def divisors(n: int) -> list[int]:
    """Every divisor of `n`, in ascending order; takes sqrt(n) divisions."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest_divisor(n: int, wanted: int) -> int:
    """Return the divisor of `n` that is closest to `wanted`, the smaller of two."""
    return min(divisors(n), key=lambda d: (abs(d - wanted), d))
