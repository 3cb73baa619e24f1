"""Documents read back, of a source and of ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megacpp.data.readers import SourceDocument, read_file
from megacpp.data.sources import Source
from megacpp.data.specials import FimIds


def read_items(source: Source, field: str = "") -> Iterator[SourceDocument]:
    """Yield every document of a source: one per record, or one or more per text file.

    Args:
        source: files to read.
        field: field of the text in records (empty: text or content).

    Raises:
        DataError: unreadable file, broken record, missing or non-text field.
    """
    for _, path in source.numbered():
        yield from read_file(path, field, source.document_bytes)


def restore(ids: np.ndarray, sentinels: FimIds) -> np.ndarray:
    """Return ids in reading order: the inverse of `arrange`, and the identity on other documents.

    SPM is PSM with an empty prefix and a middle that starts with the prefix, so one rule does both.
    """
    if not (ids == sentinels.prefix).any():
        return ids
    start, suffix, middle = (
        int(np.flatnonzero(ids == i)[0])
        for i in (sentinels.prefix, sentinels.suffix, sentinels.middle)
    )
    assert start == 0 and start < suffix < middle, "sentinels out of order"
    return np.concatenate([ids[1:suffix], ids[middle + 1 :], ids[suffix + 1 : middle]])
