"""Rows of n-gram tables against whole numbers of Python; primes against a sieve."""

from __future__ import annotations

import pytest
import torch

from megacpp.blocks.ngram.hashing import PAD, hashed, hashed_orders, odd_multipliers
from megacpp.data import specials
from megacpp.model.beside import tokens_beside
from megacpp.model.documents import Documents
from megacpp.model.primes import is_prime, primes_from


def sieve(below: int) -> list[int]:
    composite = {m for d in range(2, int(below**0.5) + 1) for m in range(d * d, below, d)}
    return [n for n in range(2, below) if n not in composite]


def wrapped(number: int) -> int:
    """To 64 bits with a sign."""
    return (number + 2**63) % 2**64 - 2**63


def test_primes_are_those_of_a_sieve() -> None:
    known = sieve(2000)
    assert [n for n in range(2000) if is_prime(n)] == known
    for least in (0, 2, 3, 100, 113, 114):
        first = next(i for i, p in enumerate(known) if p >= least)
        assert list(primes_from(least, 20)) == known[first : first + 20]


def test_multipliers_are_odd_differ_and_keep_products_inside_63_bits() -> None:
    found = [odd_multipliers(seed, layer, 4096, 3) for seed in (0, 17) for layer in (0, 1, 15)]
    assert found == [odd_multipliers(s, i, 4096, 3) for s in (0, 17) for i in (0, 1, 15)]
    flat = [m for row in found for m in row]
    assert len(set(flat)) == len(flat)
    assert all(m % 2 == 1 and 0 < m * 4095 < 2**63 for m in flat)
    assert odd_multipliers(17, 4, 23, 3) == (  # of the source
        29828490494348851,
        349486219043330349,
        79879986705210059,
    )


@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("large", [False, True])
def test_rows_are_those_of_whole_numbers(order: int, large: bool) -> None:
    generator = torch.Generator().manual_seed(order)
    ids_BT = torch.randint(0, 50, (2, 13), generator=generator)
    starts_BT = torch.rand(2, 13, generator=generator) < 0.25
    docs = Documents.from_ids(starts_BT.cumsum(1)).with_tokens(ids_BT, ids_BT)
    by_shift = [tokens_beside(docs, -shift, PAD) for shift in range(order)]
    multipliers = odd_multipliers(3, 1, 2 if large else 50, order)  # large: products wrap
    multipliers = tuple(m | 2**62 for m in multipliers) if large else multipliers
    primes = primes_from(40, 4)
    got = hashed(by_shift, multipliers, primes)
    assert got.dtype == torch.int64 and got.shape == (2, 13, 4)
    for b in range(2):
        for t in range(13):
            mix = 0
            for shift in range(order):
                inside = docs.positions_BT[b, t] >= shift
                number = int(ids_BT[b, t - shift]) if inside else PAD
                mix ^= wrapped(number * multipliers[shift])
            assert got[b, t].tolist() == [mix % p for p in primes]  # Python's % floors


def test_orders_side_by_side_are_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    by_shift = [torch.randint(0, 99, (3, 7), generator=generator) for _ in range(4)]
    multipliers, primes = odd_multipliers(0, 0, 99, 4), primes_from(30, 9)
    parts = [primes[:3], primes[3:6], primes[6:]]
    each = [hashed(by_shift[:n], multipliers, parts[n - 2]) for n in (2, 3, 4)]
    assert torch.equal(hashed_orders(by_shift, multipliers, parts), torch.cat(each, -1))


def test_a_multiplier_for_every_token() -> None:
    with pytest.raises(AssertionError, match="multiplier"):
        hashed([torch.zeros(1, 1, dtype=torch.int64)] * 3, (1, 3), (5,))


def test_what_stands_in_front_of_a_document_is_the_pad_of_the_tokenizer() -> None:
    assert PAD == specials.PAD
