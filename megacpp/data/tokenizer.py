"""A byte-level BPE tokenizer for code: exact round trip for any text, fixed special ids.

Legend: V ids of the vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megacpp.errors import DataError

# Ids of the NAM56R tokenizer line. Byte-level BPE knows every byte, so <unk> is never produced; it
# only keeps the ids that follow in their place.
SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>")
PAD, UNK, BOS, EOS, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = range(len(SPECIALS))
MIN_VOCAB = 256 + len(SPECIALS)
MAX_VOCAB = 131_072

# BPE merges inside a word and never across words. ASCII classes and no look-around: Python's `re`
# and the tokenizer's own engine then agree on every text, and a word cut out of its text is still
# the same word, which is what makes caching words exact.
WORD = (
    r"\r?\n[ \t]*"  # a line break with the indentation after it
    r"| ?[A-Za-z_][A-Za-z0-9_]*"
    r"| ?[0-9]{1,3}"
    r"| ?[!-/:-@\[-\^`{-~]+"  # punctuation without the underscore
    r"| ?[^\x00-\x7F]+"
    r"| +"
    r"|[\x00-\x1F\x7F]"
)
CACHED_WORDS = 1 << 20
PREPARE = "prepare the corpus again, with --force"


class CodeTokenizer:
    """Text to ids and back; encoding looks every distinct word up once."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True  # "<eos>" inside a text is text
        self.inner = inner
        self.vocab_size = inner.get_vocab_size()
        self._word_ids: dict[str, bytes] = {}

    @staticmethod
    def train(texts: Iterable[Sequence[str]], vocab_size: int) -> CodeTokenizer:
        """Learns merges from batches of texts; small texts may give fewer than `vocab_size` ids."""
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [
                pre_tokenizers.Split(tokenizers.Regex(WORD), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(SPECIALS),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return CodeTokenizer(inner)

    @staticmethod
    def load(path: Path) -> CodeTokenizer:
        """From a `tokenizer.json`; DataError if it cannot be read or has other special ids."""
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: is no tokenizer ({error}). Fix: {PREPARE}.") from None
        wrong = [name for i, name in enumerate(SPECIALS) if inner.token_to_id(name) != i]
        if wrong:
            raise DataError(
                f"{path}: special ids {' '.join(wrong)} are not in their place. Fix: {PREPARE}."
            )
        return CodeTokenizer(inner)

    def save(self, path: Path) -> None:
        """Writes `tokenizer.json`, which the `tokenizers` library reads on its own."""
        self.inner.save(str(path), pretty=False)

    def encode(self, text: str) -> np.ndarray:
        """uint32 ids of a text, without any special id."""
        words = re.findall(WORD, text)
        cached = self._word_ids
        new = list(set(words).difference(cached))
        if new:
            if len(cached) + len(new) > CACHED_WORDS:
                cached.clear()
                new = list(set(words))
            for word, encoding in zip(new, self.inner.encode_batch_fast(new), strict=True):
                cached[word] = np.asarray(encoding.ids, "<u4").tobytes()
        return np.frombuffer(b"".join(map(cached.__getitem__, words)), "<u4")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of ids; special ids have none."""
        pieces = self.id_bytes
        return b"".join(pieces[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; a character that the ids cut in half becomes U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    @functools.cached_property
    def id_bytes(self) -> list[bytes]:
        """UTF-8 bytes of each id, empty for special ids."""
        byte_of = byte_letters()
        pieces = [b""] * self.vocab_size
        for token, i in self.inner.get_vocab().items():
            if i >= len(SPECIALS):
                pieces[i] = bytes(byte_of[letter] for letter in token)
        return pieces

    @functools.cached_property
    def token_bytes_V(self) -> np.ndarray:
        """int64: how many UTF-8 bytes each id stands for, 0 for special ids."""
        return np.array([len(piece) for piece in self.id_bytes], np.int64)


def byte_letters() -> dict[str, int]:
    """Letter -> byte of the byte-level alphabet (GPT-2's table).

    Bytes that print in Latin-1 stand for themselves, the others for the letters from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
