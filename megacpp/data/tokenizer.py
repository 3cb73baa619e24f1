"""Tokenizer: a byte-level BPE learned from the corpus, or any `tokenizer.json`.

A learned tokenizer reproduces every text exactly and has fixed special ids. A given tokenizer may
not (some fold case or blanks); the corpus then reports it.

Legend: V ids of the vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megacpp.data.specials import (
    ADDED,
    CONFIG,
    FIM_NAMES,
    OURS,
    SPECIALS,
    Specials,
    chat_template,
    choose_specials,
    config_text,
    config_values,
    named_tokens,
    opening_ids,
    read_config,
    special_ids,
)
from megacpp.data.words import CODE, PATTERNS, Kind
from megacpp.errors import DataError

MIN_VOCAB = 256 + len(SPECIALS)
MAX_VOCAB = 131_072
CACHED_WORDS = 1 << 18  # about 50 MB in each process
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token for a byte that isn't a character


class CorpusTokenizer:
    """Conversion of text to ids and back.

    Attributes:
        specials: special ids around documents.
        vocab_size: one more than the largest id.
        template: chat template; empty if there is none.
        opening: ids that transformers puts in front of a text.
        names_bos: whether a chat template has a start token: a given configuration may name none.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        specials: Specials,
        template: str = "",
        given: tuple[str, str] = ("", ""),
    ) -> None:
        inner.encode_special_tokens = True  # "<eos>" inside a text is text
        inner.no_truncation()
        inner.no_padding()
        self.inner, self.specials, self.template = inner, specials, template
        values = config_values(given[1])
        self.opening = opening_ids(inner, specials, values)
        self.names_bos = not values or "bos" in named_tokens(values)
        self._given = given  # texts of its two files, which are saved as they came
        self.vocab_size = max(inner.get_vocab().values()) + 1
        self._state = json.loads(inner.to_str())
        # Words of code are looked up; all other text goes through the library as a whole.
        self._cached = CODE in _values(self._state["pre_tokenizer"])
        self._word_ids: dict[str, bytes] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return CorpusTokenizer, (self.inner, self.specials, self.template, self._given)

    @staticmethod
    def train(
        texts: Iterable[Sequence[str]], vocab_size: int, kind: Kind = "code"
    ) -> CorpusTokenizer:
        """Learn merges from batches of texts; small texts may give fewer than `vocab_size` ids."""
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [
                pre_tokenizers.Split(tokenizers.Regex(PATTERNS[kind]), "isolated"),
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
        return CorpusTokenizer(inner, choose_specials(inner, {}, "", "the learned tokenizer"))

    @staticmethod
    def load(path: Path, eos: str = "") -> CorpusTokenizer:
        """Read a `tokenizer.json`, and the `tokenizer_config.json` beside it if there is one.

        Args:
            path: file to read.
            eos: name of the special token that ends a document (empty: choose).

        Raises:
            DataError: it can't be read, lacks a token that the file beside it names, or no special
                token is known to end a document.
        """
        try:
            text = path.read_bytes().decode()
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            first = (str(error).splitlines() or [""])[0]
            raise DataError(
                f"tokenizer={path}: is not a tokenizer ({first}). "
                "Fix: give a Hugging Face tokenizer.json or the folder of a corpus."
            ) from None
        vocab = inner.get_vocab()
        if not vocab:
            raise DataError(f"tokenizer={path}: has no vocabulary. Fix: give a trained one.")
        for names in FIM_NAMES:  # some publish these as ordinary tokens, which a text could spell
            if vocab.keys() >= set(names):
                inner.add_special_tokens(list(names))
        config = read_config(path)
        values = config_values(config)
        named = named_tokens(values)
        special = special_ids(inner).values()  # transformers adds those that are only named
        inner.add_special_tokens([t for t in named.values() if t in vocab and t not in special])
        if not special_ids(inner):
            inner.add_special_tokens([ADDED])
            text = ""
        marks = choose_specials(inner, named, eos, str(path))
        if values.get("bos_token", "") is None:  # there is a name for it, and it isn't to be used
            marks = replace(marks, bos=marks.eos)
        return CorpusTokenizer(inner, marks, chat_template(path), (text, config))

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` and, beside it, special tokens and chat template."""
        text, config = self._given
        path.write_text(text or self.inner.to_str(pretty=False), encoding="utf-8", newline="")
        config = config_text(self.inner, self.specials, self.template, config)
        path.with_name(CONFIG).write_text(config, encoding="utf-8", newline="")

    @property
    def learned(self) -> bool:
        """Whether the vocabulary was learned by `train`."""
        ours = _values(self._state["pre_tokenizer"]) & set(PATTERNS.values())
        return bool(ours) and self.specials == OURS

    @property
    def rules(self) -> dict[str, Any]:
        """Rules that make ids of a text: all but a post-processor, which adds special ids."""
        return {key: rule for key, rule in self._state.items() if key != "post_processor"}

    def encode(self, text: str) -> np.ndarray:
        """Return the uint32 ids of a text, without any special id."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the uint32 ids of several texts; code on one core, other text on all."""
        if self._cached:
            return [self._by_words(text) for text in texts]
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 bytes of ids; special ids have none."""
        pieces = self.id_bytes
        return b"".join(pieces[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; a character that the ids split becomes U+FFFD."""
        if self._byte_level:
            return self.decode_bytes(ids).decode(errors="replace")
        return self.inner.decode(list(ids), skip_special_tokens=True)

    @functools.cached_property
    def special_names(self) -> dict[int, str]:
        """Names of the special ids."""
        marks = self.specials
        return special_ids(self.inner, (marks.bos, marks.eos, marks.pad))

    @functools.cached_property
    def id_bytes(self) -> list[bytes]:
        """UTF-8 bytes of each id, empty for special ids.

        For a tokenizer that isn't byte-level: the text that the id adds after another id.
        """
        pieces = [b""] * self.vocab_size
        vocab = {t: i for t, i in self.inner.get_vocab().items() if i not in self.special_names}
        if self._byte_level:
            byte_of = byte_letters()
            for token, i in vocab.items():
                known = all(letter in byte_of for letter in token)
                pieces[i] = bytes(byte_of[x] for x in token) if known else token.encode()
            return pieces
        anchor = next((i for t, i in vocab.items() if t.isascii() and t.isalpha()), 0)
        alone = self.inner.decode([anchor])
        both = self.inner.decode_batch([[anchor, i] for i in vocab.values()])
        unknown = self._state["model"].get("unk_token")
        for (token, i), text in zip(vocab.items(), both, strict=True):
            byte = BYTE.fullmatch(token)
            if byte:
                pieces[i] = bytes([int(byte[1], 16)])
            elif text.startswith(alone) and token != unknown:
                pieces[i] = text[len(alone) :].encode()
        return pieces

    @functools.cached_property
    def token_bytes_V(self) -> np.ndarray:
        """Number of UTF-8 bytes of each id, int64; 0 for special ids."""
        return np.array([len(piece) for piece in self.id_bytes], np.int64)

    @functools.cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in _values(self._state["decoder"])

    def _by_words(self, text: str) -> np.ndarray:
        """Return the ids of code; every distinct word is encoded once."""
        found = re.findall(CODE, text)
        cached = self._word_ids
        new = list(set(found).difference(cached))
        if new:
            if len(cached) + len(new) > CACHED_WORDS:
                cached.clear()
                new = list(set(found))
            encodings = self.inner.encode_batch_fast(new, add_special_tokens=False)
            for word, encoding in zip(new, encodings, strict=True):
                cached[word] = np.asarray(encoding.ids, "<u4").tobytes()
        return np.frombuffer(b"".join(map(cached.__getitem__, found)), "<u4")


def byte_letters() -> dict[str, int]:
    """Return letter -> byte of the byte-level alphabet (GPT-2's table).

    Bytes that print in Latin-1 map to themselves, the others to the letters from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(shown))
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _values(state: object) -> set[str]:
    """Return all strings in the description of a part of a tokenizer."""
    if isinstance(state, dict):
        return set().union(*map(_values, state.values()))
    if isinstance(state, list):
        return set().union(*map(_values, state))
    return {state} if isinstance(state, str) else set()
