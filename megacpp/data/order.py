"""Order of training rows: a permutation that is computed, never stored.

A Feistel network permutes any power-of-four range, whatever its round function is (Luby and Rackoff
1988); numbers outside the wanted range are mapped again until they fall inside. The n-th row of any
epoch therefore costs a few multiplications, needs no table and no generator state, and is the same
on every machine and library version.
"""

from __future__ import annotations

import functools
import hashlib

ROUNDS = 8
WORD_MASK = (1 << 64) - 1


def shuffled(index: int, count: int, seed: int, epoch: int) -> int:
    """Return the image of `index` in the permutation of `range(count)` for (seed, epoch).

    Args:
        index: number to permute.
        count: size of the permutation.
        seed: seed of the run.
        epoch: number of the epoch.
    """
    assert 0 <= index < count, "index outside the permutation"
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    keys = _round_keys(seed, epoch)
    while True:
        left, right = index >> half_bits, index & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) >> (64 - half_bits))
        index = left << half_bits | right
        if index < count:
            return index


@functools.lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    noise = hashlib.sha512(b"rows\0%d\0%d" % (seed, epoch)).digest()
    return tuple(int.from_bytes(noise[i : i + 8], "little") for i in range(0, 8 * ROUNDS, 8))


def _mix(word: int) -> int:
    """Mix 64 bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD_MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD_MASK
    return word ^ (word >> 31)
