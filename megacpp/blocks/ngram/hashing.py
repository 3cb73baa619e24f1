"""Hashes of the last few token ids: rows of the tables that n-gram memories look up.

    mix_n = (c_t m_0) xor (c_{t-1} m_1) xor ... (c_{t-n+1} m_{n-1})      row_j = mix_n mod p_j

with odd multipliers m and a prime p_j for each table, so that two n-grams that meet in one table
part in the next. Products wrap at 64 bits; the remainder is never negative.
Source: NgramHashMapping of Engram (arXiv 2601.07372).

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megacpp.torch_extras import listed

PAD = 0  # stands in front of a document: <pad> of megacpp/data/specials.py

_MAX_INT64 = 2**63 - 1
_LAYER_STEP = 10_007  # between the seeds of neighbouring layers, as in the source


def odd_multipliers(seed: int, layer: int, num_ids: int, order: int) -> tuple[int, ...]:
    """Return an odd multiplier for each of `order` tokens: a pure function of its arguments.

    Args:
        seed: of the hashes.
        layer: of the model, so that no two layers hash alike.
        num_ids: ids are below this; times a multiplier they stay inside 63 bits.
        order: tokens of an n-gram.
    """
    half = max(1, _MAX_INT64 // num_ids // 2)
    drawn = np.random.default_rng(seed + _LAYER_STEP * layer).integers(0, half, size=order)
    return tuple(2 * int(number) + 1 for number in drawn)


def hashed(
    ids_by_shift: Sequence[Tensor], multipliers: Sequence[int], primes: Sequence[int]
) -> Tensor:
    """Rows `[B, T, len(primes)]` of the n-gram that ends at each token, one for each table.

    Args:
        ids_by_shift: int64 `[B, T]`: the ids themselves, those one token back, ... (n of them;
            `tokens_beside(docs, -shift, PAD)`).
        multipliers: at least n.
        primes: numbers of rows of the tables.
    """
    return _rows(_mixed(ids_by_shift, multipliers)[-1], primes)


def hashed_orders(
    ids_by_shift: Sequence[Tensor], multipliers: Sequence[int], primes: Sequence[Sequence[int]]
) -> Tensor:
    """Return `hashed` of orders 2, 3, ... side by side; `primes` has the tables of each order."""
    mixes = _mixed(ids_by_shift, multipliers)[1:]
    return torch.cat([_rows(mix, own) for mix, own in zip(mixes, primes, strict=True)], -1)


def _mixed(ids_by_shift: Sequence[Tensor], multipliers: Sequence[int]) -> list[Tensor]:
    """Return hashes `[B, T]` of orders 1, 2, ...; each continues from the one before."""
    mixes: list[Tensor] = []
    for ids_BT, multiplier in zip(ids_by_shift, multipliers, strict=False):
        own_BT = ids_BT * multiplier  # int64 wraps
        mixes.append(own_BT ^ mixes[-1] if mixes else own_BT)
    assert len(mixes) == len(ids_by_shift), "a multiplier for every token of an n-gram"
    return mixes


def _rows(mix_BT: Tensor, primes: Sequence[int]) -> Tensor:
    return mix_BT[..., None] % listed(primes, mix_BT.device)
