"""Bits per byte of plain compressors on the held-out text: bars for a model's figure.

Torch and numpy aren't imported here: the report page reads the same table.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

STREAM_BYTES = 1 << 25  # xz -9 takes about a second a MiB


class CompressorBar(NamedTuple):
    """Figure of one compressor and how it was used."""

    name: str
    bits_per_byte: float
    how: str


def compressor_bars(values: Mapping[str, Any]) -> list[CompressorBar]:
    """Bars in the figures of an evaluation, or in a split's entry of the index."""
    known = (
        ("gzip_bits_per_byte", "gzip -9", "each document compressed alone"),
        ("xz_bits_per_byte", "xz -9", "all documents as one stream"),
    )
    return [
        CompressorBar(name, values[key], how)
        for key, name, how in known
        if values.get(key) is not None
    ]


def xz_bits_per_byte(documents: Iterable[bytes], total: int) -> tuple[float | None, int]:
    """Bits per byte of `xz -9` over documents end to end, and how many bytes were packed.

    At most STREAM_BYTES. None with a Python that was built without liblzma.

    Args:
        total: bytes of the documents: xz needs ten times its window, and here no wider one.
    """
    try:
        lzma = importlib.import_module("lzma")
    except ImportError:
        return None, 0
    window = 1 << max(12, min(total, STREAM_BYTES).bit_length())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(window, 1 << 26)}]
    packer = lzma.LZMACompressor(filters=filters)
    packed = taken = 0
    for document in documents:
        document = document[: STREAM_BYTES - taken]
        if not document:
            break
        packed += len(packer.compress(document))
        taken += len(document)
    return 8 * (packed + len(packer.flush())) / taken, taken


def compressor_lines(entry: Mapping[str, Any]) -> list[str]:
    """Bits per byte of compressors on the held-out text, from its entry in the index."""
    whole = entry["xz_bits_per_byte"] is None or entry["xz_bytes"] == entry["text_bytes"]
    part = "" if whole else f", first {entry['xz_bytes']:,} bytes"
    (name, bits, how), *others = compressor_bars(entry)
    return [
        f"{name} {bits:.3f} bits per byte, {how}",
        *(f"{name} {bits:.3f}, {how}{part}" for name, bits, how in others),
    ]
