"""Fill-in-the-middle: split some documents in three parts and reorder them.

Bavarian et al. 2022 (arXiv 2207.14255). Half of the split documents are written prefix, suffix,
middle (PSM), half suffix, prefix + middle (SPM):

    PSM  <fim_prefix> prefix <fim_suffix> suffix <fim_middle> middle
    SPM  <fim_prefix> <fim_suffix> suffix <fim_middle> prefix middle
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megacpp.data.specials import FimIds


@dataclass(frozen=True)
class FimParts:
    """Document split in three parts; `suffix_first` selects SPM."""

    prefix: str
    middle: str
    suffix: str
    suffix_first: bool


def cut(text: str, digest: bytes, seed: int, rate: float) -> FimParts | None:
    """Split a selected document in three, or return None; a pure function of (seed, document hash).

    Args:
        text: document.
        digest: SHA-256 of the text's UTF-8 bytes.
        seed: seed of selection and positions.
        rate: share of documents that are split, 0 to 1.
    """
    noise = hashlib.sha256(b"fim\0%d\0" % seed + digest).digest()
    chosen, order, one, two = (int.from_bytes(noise[i : i + 8], "little") for i in range(0, 32, 8))
    if chosen >= rate * 2**64:
        return None
    # Cuts fall between characters: every part stays valid UTF-8.
    first, second = sorted((one % (len(text) + 1), two % (len(text) + 1)))
    return FimParts(text[:first], text[first:second], text[second:], bool(order & 1))


def arrange(parts: FimParts, encode: Callable[[str], np.ndarray], sentinels: FimIds) -> np.ndarray:
    """Return the ids of a split document with its sentinels.

    Each part is encoded separately, as it is when a user's prompt ends at the split.
    """
    prefix, middle, suffix = (encode(p) for p in (parts.prefix, parts.middle, parts.suffix))
    first, between, last = [sentinels.prefix], [sentinels.suffix], [sentinels.middle]
    if parts.suffix_first:
        pieces = (first, between, suffix, last, prefix, middle)
    else:
        pieces = (first, prefix, between, suffix, last, middle)
    return np.concatenate([np.asarray(p, np.uint32) for p in pieces])
