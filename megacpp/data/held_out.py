"""Held-out documents: their selection, their compressed size, and the prompt of a sample.

A document is held out if its hash is below `validation_fraction`. More follow in the order of
hashes until there are 64 documents and 1 % of the bytes, but at most a tenth of either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

MIN_DOCUMENTS = 64  # fewer carry no verdict against a compressor
MIN_SHARE = 0.01  # of the bytes
MOST = 0.10  # of documents and of bytes, unless a larger fraction is asked for
PROMPT = 40  # characters of a sample prompt, at most


def choose_held_out(digests: Sequence[bytes], sizes: Sequence[int], fraction: float) -> set[int]:
    """Return the numbers of the held-out documents; neither they nor the others are ever empty.

    Args:
        digests: SHA-256 of each document, which also orders them.
        sizes: bytes of each document.
        fraction: share of documents that are held out.
    """
    order = np.argsort(np.fromiter(digests, "S32", len(digests)), kind="stable")
    below = fraction * 2**64  # a hash below makes a document held out, whatever the others are
    chosen = {i for i, one in enumerate(digests) if int.from_bytes(one[:8], "big") < below}
    total, held = int(np.sum(sizes)), sum(sizes[i] for i in chosen)
    most_documents, most_bytes = max(len(chosen), MOST * len(order)), max(held, MOST * total)
    for i in map(int, order[len(chosen) :]):
        if len(chosen) >= MIN_DOCUMENTS and held >= MIN_SHARE * total:
            break
        if len(chosen) + 1 <= most_documents and held + sizes[i] <= most_bytes:
            chosen.add(i)
            held += sizes[i]
    if not chosen:
        chosen = {int(order[0])}
    return chosen - {int(order[-1])} if len(chosen) == len(order) else chosen


def shortfall(documents: int, text_bytes: int, all_documents: int, all_bytes: int) -> str:
    """Return a warning about too few held-out documents, with numbers and a fix; empty if enough.

    Args:
        documents: held-out documents.
        text_bytes: bytes of these.
        all_documents: documents of the corpus.
        all_bytes: bytes of these.
    """
    share = text_bytes / all_bytes
    if documents >= MIN_DOCUMENTS and share >= MIN_SHARE:
        return ""
    fraction = -(-100 * MIN_DOCUMENTS // all_documents) / 100 + 0.02
    more = f", or --validation-fraction {fraction:g}" if fraction <= 0.5 else ""
    size = all_bytes // all_documents
    cut = f", or cut long ones: --document-bytes {size // 16}" if size >= 1 << 16 else ""
    verdict = ": no verdict against gzip" if documents < MIN_DOCUMENTS else ""
    return (
        f"few held-out documents: {documents} of {all_documents:,} with {share:.1%} of the bytes "
        f"({MIN_DOCUMENTS} and {MIN_SHARE:.0%} are wanted){verdict}. "
        f"Fix: prepare more documents{more}{cut}."
    )


def sample_prompt(read: Callable[[int], bytes], held_out: Sequence[int]) -> str:
    """Return the first words of a held-out document with a unique start, else of the first."""
    starts = [read(i)[: 4 * PROMPT].decode(errors="ignore")[:PROMPT] for i in held_out[:256]]
    alike = Counter(start[: PROMPT // 2] for start in starts)
    own = (s for s in starts if alike[s[: PROMPT // 2]] == 1 and s.strip())
    text = next(own, starts[0])
    cut = len(text.rstrip()) if len(text) < PROMPT else max(text.rfind(x) for x in " \n")
    # Scripts without blanks: half of the characters.
    return text[:cut].rstrip() if cut > PROMPT // 4 else text[: PROMPT // 2].rstrip()
