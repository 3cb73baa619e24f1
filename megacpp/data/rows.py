"""Rows of whole conversations: an answer never stands without its question.

stream   [a a a] [b b b b] [c c] [d d d d d d d]     documents, T = 6 tokens a row
row 0    a a a b b b b                               T inputs and one more label
row 1    c c . . . . .                               d doesn't fit any more: padding
row 2    d d d d d d d
"""

from __future__ import annotations

import numpy as np


def whole_rows(offsets: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each row begins in a stream of documents, and where it ends, int64.

    A row holds as many whole documents as fit, in order. A document longer than a row is cut into
    rows of its own.

    Args:
        offsets: where each document begins, and the end of the last one.
        seq_len: tokens of a row; it reads one more as a label.
    """
    begins, ends, document = [], [], 0
    while document < len(offsets) - 1:
        begin = int(offsets[document])
        last = int(np.searchsorted(offsets, begin + seq_len + 1, "right")) - 1
        document = max(last, document + 1)
        end = int(offsets[document])
        for piece in range(begin, max(end - 1, begin + 1), seq_len):
            begins.append(piece)
            ends.append(min(piece + seq_len + 1, end))
    return np.array(begins, np.int64), np.array(ends, np.int64)
