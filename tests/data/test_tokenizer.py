import random
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megacpp.data.specials import (
    BOS,
    EOS,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    PAD,
    SPECIALS,
)
from megacpp.data.tokenizer import CACHED_WORDS, MIN_VOCAB, CorpusTokenizer, byte_letters
from megacpp.data.words import CODE
from megacpp.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(documents: list[str]) -> CorpusTokenizer:
    return CorpusTokenizer.train([documents], 400)


def random_texts(count: int) -> list[str]:
    """Any code point that UTF-8 can spell, with many blanks, breaks and controls among them."""
    noise = random.Random(0)
    blanks = " \n\t\r\x00\x0b\x0c\x7f\x85\xa0\u2028"

    def letter() -> str:
        code = noise.choice([0x80, 0x250, 0x3000, 0x110000])
        one = chr(noise.randrange(code))
        return noise.choice(blanks) if noise.random() < 0.3 or "\ud800" <= one <= "\udfff" else one

    return ["".join(letter() for _ in range(noise.randrange(50))) for _ in range(count)]


def test_special_ids() -> None:
    assert (PAD, BOS, EOS) == (0, 2, 3)
    assert (FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX) == (4, 5, 6)


def test_ids_of_the_table(tokenizer: CorpusTokenizer) -> None:
    assert tokenizer.vocab_size == 400
    assert [tokenizer.inner.id_to_token(i) for i in range(len(SPECIALS))] == list(SPECIALS)
    assert {tokenizer.id_bytes[i] for i in range(len(SPECIALS), MIN_VOCAB)} == {
        bytes([b]) for b in range(256)
    }


def test_byte_letters_are_the_library_alphabet() -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert set(byte_letters()) == set(alphabet)
    assert sorted(byte_letters().values()) == list(range(256))


def test_round_trip_and_byte_counts_of_any_text(
    tokenizer: CorpusTokenizer, documents: list[str]
) -> None:
    texts = [*documents, *random_texts(500), "", "\r\n\r\n \t x", "a" * 500, "<eos><pad>"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.token_bytes_V[ids].sum() == len(text.encode())
        assert not len(ids) or ids.min() >= len(SPECIALS)  # a spelled special stays text


def test_cached_words_equal_the_library(tokenizer: CorpusTokenizer, documents: list[str]) -> None:
    for text in [*documents, *random_texts(500), "a <eos>; <pad><fim_prefix>"]:
        assert tokenizer.encode(text).tolist() == tokenizer.inner.encode(text).ids


def test_a_full_cache_starts_again(documents: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert CACHED_WORDS > 100_000
    monkeypatch.setattr("megacpp.data.tokenizer.CACHED_WORDS", 40)
    small = CorpusTokenizer.train([documents], 400)
    for text in documents[:10]:
        assert small.encode(text).tolist() == small.inner.encode(text).ids
        assert len(small._word_ids) <= max(40, len(set(re.findall(CODE, text))))


def test_specials_have_no_bytes(tokenizer: CorpusTokenizer) -> None:
    assert tokenizer.token_bytes_V[: len(SPECIALS)].tolist() == [0] * len(SPECIALS)
    assert tokenizer.token_bytes_V[len(SPECIALS) :].min() == 1
    ids = np.concatenate([[BOS], tokenizer.encode("int x;"), [EOS, PAD]])
    assert tokenizer.decode(ids.tolist()) == "int x;"


def test_training_is_deterministic(
    tokenizer: CorpusTokenizer, documents: list[str], tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "one.json")
    CorpusTokenizer.train([documents[:20], documents[20:]], 400).save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_small_text_gives_fewer_ids() -> None:
    assert CorpusTokenizer.train([["ab ab ab"]], 5000).vocab_size < 300


def test_saved_tokenizer_loads(tokenizer: CorpusTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    again = CorpusTokenizer.load(tmp_path / "tokenizer.json")
    text = "namespace x { <eos> größe 🙂"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert again.id_bytes == tokenizer.id_bytes


def test_load_refuses_what_is_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        CorpusTokenizer.load(path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    with pytest.raises(DataError, match="has no vocabulary"):
        CorpusTokenizer.load(path)
