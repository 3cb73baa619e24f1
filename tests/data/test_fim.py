import hashlib

import numpy as np
import pytest

from megacpp.data import fim
from megacpp.data.specials import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, FimIds
from megacpp.data.tokenizer import CorpusTokenizer
from tests.data.reading import restore

IDS = FimIds(FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX)


def sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@pytest.fixture(scope="module")
def tokenizer(documents: list[str]) -> CorpusTokenizer:
    return CorpusTokenizer.train([documents], 400)


def test_every_cut_restores_the_document(tokenizer: CorpusTokenizer, documents: list[str]) -> None:
    orders = set()
    for text in [*documents, "x", "🙂", "🙂ß"]:
        for seed in range(4):
            parts = fim.cut(text, sha256(text), seed, 1.0)
            assert parts is not None
            assert parts.prefix + parts.middle + parts.suffix == text
            ids = fim.arrange(parts, tokenizer.encode, IDS)
            assert tokenizer.decode(restore(ids, IDS).tolist()) == text
            orders.add(parts.suffix_first)
    assert orders == {False, True}


def test_the_two_orders_by_hand() -> None:
    def encode(text: str) -> np.ndarray:
        return np.array([100 + int(c) for c in text], np.uint32)

    psm = fim.arrange(fim.FimParts("12", "3", "45", False), encode, IDS)
    spm = fim.arrange(fim.FimParts("12", "3", "45", True), encode, IDS)
    p, m, s = FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX
    assert psm.tolist() == [p, 101, 102, s, 104, 105, m, 103]
    assert spm.tolist() == [p, s, 104, 105, m, 101, 102, 103]
    for ids in (psm, spm, encode("12345")):
        assert restore(ids, IDS).tolist() == [101, 102, 103, 104, 105]


def test_pure_function_of_seed_and_hash(documents: list[str]) -> None:
    def cuts(seed: int, rate: float, texts: list[str]) -> dict[str, fim.FimParts | None]:
        return {t: fim.cut(t, sha256(t), seed, rate) for t in texts}

    forward, backward = cuts(1, 0.5, documents), cuts(1, 0.5, documents[::-1])
    assert forward == backward
    assert cuts(2, 0.5, documents) != forward
    # A higher rate cuts more documents and leaves the cuts that were there alone.
    assert all(cuts(1, 0.8, documents)[t] == c for t, c in forward.items() if c is not None)


def test_rate_and_halves() -> None:
    digests = [hashlib.sha256(b"%d" % i).digest() for i in range(4000)]
    cuts = [c for d in digests if (c := fim.cut("x" * 100, d, 3, 0.5)) is not None]
    first = sum(c.suffix_first for c in cuts)
    # Binomial: five standard deviations are 5 * sqrt(4000) / 2 = 158 and 5 * sqrt(2000) / 2 = 112.
    assert abs(len(cuts) - 2000) < 158 and abs(first - len(cuts) / 2) < 112
    assert not any(fim.cut("x", d, 3, 0.0) for d in digests)
    assert all(fim.cut("x", d, 3, 1.0) for d in digests)
