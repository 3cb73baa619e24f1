"""Tokenizer with further words, for the chapter and the benchmark of a grown vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from megacpp.data.tokenizer import CorpusTokenizer

WORD = re.compile(r"[A-Za-z_]{5,}")


def grow_tokenizer(old: Path, texts: Iterable[str], out: Path, count: int) -> list[str]:
    """Write a tokenizer with the words of some texts that save the most ids.

    Args:
        old: folder of a tokenizer (of a corpus).
        texts: texts to count words in.
        out: folder of the new tokenizer.
        count: number of new ids.

    Returns:
        The words, in the order of their ids.
    """
    tokenizer = CorpusTokenizer.load(old / "tokenizer.json")
    found = Counter(word for text in texts for word in WORD.findall(text))
    saved = {word: n * (len(tokenizer.encode(word)) - 1) for word, n in found.most_common(1000)}
    words = sorted(saved, key=lambda word: -saved[word])[:count]
    tokenizer.inner.add_tokens(words)
    out.mkdir(parents=True, exist_ok=True)
    CorpusTokenizer(tokenizer.inner, tokenizer.specials).save(out / "tokenizer.json")
    return words
