"""Settings of a corpus and their rules."""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from megacpp.config.settings import setting, settings_of
from megacpp.data.sources import TORCH_HEADERS
from megacpp.data.tokenizer import MAX_VOCAB, MIN_VOCAB, SPECIALS
from megacpp.errors import config_error

VOCAB_SIZE = 4096  # of a learned tokenizer


@dataclass(frozen=True)
class CorpusSpec:
    """Settings of a corpus: the same spec and source give the same bytes."""

    source: str = setting(
        TORCH_HEADERS,
        "A folder, a text or record file, a URL of either, datasets:NAME:SPLIT, or torch-headers.",
        positional=True,
    )
    globs: tuple[str, ...] = setting(
        (), "Patterns of the files of a folder (none: text and record files, none hidden)."
    )
    field: str = setting(
        "", "Text of .jsonl and .parquet records (empty: text, content, or conversations)."
    )
    document_bytes: int = setting(
        0,
        "Longest document; longer ones are cut at blank lines (0: 2 MiB, a lone text in 1,024).",
        "bytes",
        at_least=0,
        at_most=1 << 23,  # encoding takes about 100 bytes of memory for each: 1 GB
    )
    tokenizer: str = setting(
        "", "A tokenizer.json, or a corpus whose tokenizer is shared (empty: learn one)."
    )
    eos: str = setting(
        "", "Special token of --tokenizer that ends a document (empty: found by name)."
    )
    text_kind: Literal["auto", "code", "prose"] = setting(
        "auto", "Words that a learned tokenizer splits at: of code, of prose in any script."
    )
    vocab_size: int = setting(
        0, "Ids of a learned tokenizer, special ids included (0: 4,096).", at_most=MAX_VOCAB
    )
    validation_fraction: float = setting(
        0.02, "Share of documents held out, more where too few for a verdict.", above=0, below=1
    )
    fim_rate: float = setting(
        0.0, "Share of training documents told as fill-in-the-middle.", at_least=0, at_most=1
    )
    seed: int = setting(42, "Seed of the order of documents and of fill-in-the-middle.", at_least=0)
    tokenizer_bytes: int = setting(
        8_000_000, "First training documents that the tokenizer learns from.", "bytes", at_least=1
    )
    shard_tokens: int = setting(
        1 << 26, "Tokens that end a shard with the document that reaches them.", at_least=1
    )

    def check(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: the first rule that a setting breaks.
        """
        if not MIN_VOCAB <= (self.vocab_size or VOCAB_SIZE) <= MAX_VOCAB:
            rule = f"must be {MIN_VOCAB} (256 bytes + {len(SPECIALS)} specials) to {MAX_VOCAB}"
            raise config_error("vocab_size", self.vocab_size, rule, "use 4096 or 65536")
        for one in settings_of(CorpusSpec, top=True).values():
            if error := one.broken(getattr(self, one.key)):
                raise error
        if not all(self.globs):
            raise config_error("globs", self.globs, "must name a pattern", "use *.h *.cpp")
        learned = CorpusSpec.tokenizer_bytes
        for key, unset in (("vocab_size", 0), ("text_kind", "auto"), ("tokenizer_bytes", learned)):
            if self.tokenizer and getattr(self, key) != unset:
                rule = f"--tokenizer {self.tokenizer} brings its own"
                raise config_error(key, getattr(self, key), rule, "leave it out")
        if self.eos and not self.tokenizer:
            rule = "a learned tokenizer has its own <eos>"
            raise config_error("eos", self.eos, rule, "leave it out")

    def arguments(self) -> dict[str, Any]:
        """Return the spec as the index stores it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(CorpusSpec)}
        size = self.vocab_size or (0 if self.tokenizer else VOCAB_SIZE)
        source = os.path.normpath(self.source)
        return values | {"source": source, "globs": list(self.globs), "vocab_size": size}

    def command(self) -> str:
        """Return the command line of this spec, without --out."""
        words = ["megacpp", "data", "prepare", shlex.quote(self.source)]
        for f in dataclasses.fields(CorpusSpec)[1:]:
            value = getattr(self, f.name)
            if value != f.default:
                values = value if isinstance(value, tuple) else (value,)
                words += [f"--{f.name.replace('_', '-')}", *(shlex.quote(str(v)) for v in values)]
        return " ".join(words)
