"""From a source to a corpus on disk: read, deduplicate, split, learn a tokenizer, write shards.

Nothing depends on the order in which files are found: a document's split and place are pure
functions of its hash (and the seed). Everything goes to a temporary folder that is renamed at the
end, so a folder with an index is always whole.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megacpp.data import fim
from megacpp.data.shards import (
    FORMAT_VERSION,
    INDEX,
    TOKENIZER,
    SplitWriter,
    file_entry,
    read_index,
    token_dtype,
    write_index,
)
from megacpp.data.sources import DEFAULT_GLOBS, TORCH_HEADERS, Source, find_source, read_items
from megacpp.data.spool import Spool
from megacpp.data.tokenizer import BOS, EOS, MAX_VOCAB, MIN_VOCAB, SPECIALS, CodeTokenizer
from megacpp.errors import ConfigError, DataError, config_error
from megacpp.progress import Advance, Stage, progress_bars
from megacpp.settings import setting, settings_of

BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class CorpusSpec:
    """What goes into a corpus: the same spec on the same source gives the same bytes."""

    source: str = setting(
        TORCH_HEADERS,
        "A folder, a .jsonl, .jsonl.zst or .parquet file, or torch-headers.",
        positional=True,
    )
    globs: tuple[str, ...] = setting(DEFAULT_GLOBS, "Patterns of the files of a folder.")
    field: str = setting("text", "Text field of .jsonl records, text column of .parquet files.")
    vocab_size: int = setting(
        4096, "Ids of the tokenizer, special ids included.", at_least=MIN_VOCAB, at_most=MAX_VOCAB
    )
    validation_fraction: float = setting(
        0.02, "Share of documents that is held out.", above=0, below=1
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
        """Raises ConfigError for the first broken rule."""
        for one in settings_of(CorpusSpec, top=True).values():
            if error := one.broken(getattr(self, one.key)):
                raise error
        if not self.globs or not all(self.globs):
            raise config_error("globs", self.globs, "must name a pattern", "use *.h *.cpp")

    def arguments(self) -> dict[str, Any]:
        """The spec as the index keeps it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(CorpusSpec)}
        return values | {"source": os.path.normpath(self.source), "globs": list(self.globs)}


@dataclass(frozen=True)
class Prepared:
    """Where a corpus is, what its index says, and whether this call made it."""

    path: Path
    index: dict[str, Any]
    made: bool
    seconds: float


def ensure_corpus(spec: CorpusSpec, out: Path, force: bool = False) -> Prepared:
    """Makes the corpus at `out`, or finds that it is there; safe to call from several processes.

    Raises:
        ConfigError: a broken rule, or `out` holds something else.
        DataError: the source or the corpus that is there cannot be read.
    """
    spec.check()
    start = time.perf_counter()
    there = None if force else _existing(spec, out)
    if there is not None:
        return Prepared(out, there, False, time.perf_counter() - start)
    if out.exists() and not (out / INDEX).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise config_error("out", out, "is there and is no corpus", "choose another --out")
    final = out.resolve()
    temporary = final.with_name(f".{final.name}.{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _build(spec, temporary)
        made = _publish(spec, temporary, out, force)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"out={out}: cannot be written ({reason}). Fix: check disk and rights."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Prepared(out, read_index(out), made, time.perf_counter() - start)


def gzip_bits_per_byte(documents: Iterable[bytes]) -> float:
    """Bits per byte of `gzip -9` over each document alone: what a plain compressor reaches."""
    packed = total = 0
    for document in documents:
        packed += len(gzip.compress(document, 9, mtime=0))
        total += len(document)
    return 8 * packed / total


def in_validation(digest: bytes, fraction: float) -> bool:
    """Whether a document is held out: a pure function of its SHA-256."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _build(spec: CorpusSpec, folder: Path) -> None:
    """Writes every file of the corpus into `folder`, index last."""
    source = find_source(spec.source, spec.globs)
    with progress_bars(keep=True) as stage, Spool(folder / "spool") as spool:
        counts = _read(spec, source, spool, stage("reading", source.total_bytes))
        train, held_out = _split(spec, spool)
        tokenizer, learned = _learn(spec, spool, train, stage)
        tokenizer.save(folder / TOKENIZER)
        advance = stage("encoding", spool.total_bytes)
        dtype = token_dtype(tokenizer.vocab_size)
        splits, cuts = {}, {"psm": 0, "spm": 0}
        for name, members, rate in (("train", train, spec.fim_rate), ("validation", held_out, 0.0)):
            writer = SplitWriter(folder, name, dtype, spec.shard_tokens)
            for member in members:
                ids, kind = _encode(spool, member, tokenizer, spec.seed, rate)
                writer.add(ids)
                advance(spool.sizes[member])
                if kind:
                    cuts[kind] += 1
            text_bytes = sum(spool.sizes[member] for member in members)
            splits[name] = writer.close() | {"text_bytes": text_bytes}
        advance = stage("gzip -9 of held-out documents", splits["validation"]["text_bytes"])
        figure = gzip_bits_per_byte(_advancing(map(spool.read, held_out), advance))
        splits["validation"]["gzip_bits_per_byte"] = figure
    index = {
        "format_version": FORMAT_VERSION,
        "arguments": spec.arguments(),
        "source": {"description": source.description, "files": len(source.files)},
        "documents": counts | {"kept": len(train) + len(held_out)},
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "special_ids": {name: i for i, name in enumerate(SPECIALS)},
        "tokenizer": file_entry(folder / TOKENIZER) | learned,
        "fill_in_the_middle": cuts,
        "splits": splits,
    }
    write_index(folder, index)


def _read(spec: CorpusSpec, source: Source, spool: Spool, advance: Advance) -> dict[str, int]:
    """Spools every new document; how many were read, empty, broken or seen before."""
    counts = {"read": 0, "empty": 0, "invalid_utf8": 0, "duplicates": 0}
    for text, read_bytes in read_items(source, spec.field):
        counts["read"] += 1
        if text is None:
            counts["invalid_utf8"] += 1
        elif not text:
            counts["empty"] += 1
        elif not spool.add(text.encode()):
            counts["duplicates"] += 1
        advance(read_bytes)
    return counts


def _split(spec: CorpusSpec, spool: Spool) -> tuple[list[int], list[int]]:
    """Numbers of the training and of the held-out documents, each shuffled by (seed, hash)."""
    digests = spool.digests
    if len(digests) < 2:
        raise DataError(
            f"source={spec.source}: {len(digests)} different documents with text, a corpus needs 2 "
            "(one is held out). Fix: give more files, or check --globs and --field."
        )
    held_out = {i for i, d in enumerate(digests) if in_validation(d, spec.validation_fraction)}
    by_hash = sorted(range(len(digests)), key=digests.__getitem__)
    if not held_out:  # a small corpus holds out the document that comes next by the same rule
        held_out = {by_hash[0]}
    if len(held_out) == len(digests):
        held_out.remove(by_hash[-1])

    def place(i: int) -> bytes:
        return hashlib.sha256(b"order\0%d\0" % spec.seed + digests[i]).digest()

    order = sorted(by_hash, key=place)
    return [i for i in order if i not in held_out], [i for i in order if i in held_out]


def _learn(
    spec: CorpusSpec, spool: Spool, train: list[int], stage: Stage
) -> tuple[CodeTokenizer, dict[str, int]]:
    """A tokenizer of the first training documents, and how many documents and bytes those are."""
    ends = np.cumsum([spool.sizes[i] for i in train])
    count = min(len(train), int(np.searchsorted(ends, spec.tokenizer_bytes)) + 1)
    learned = {"learned_documents": count, "learned_bytes": int(ends[count - 1])}
    advance = stage("learning the tokenizer", learned["learned_bytes"])

    def batches() -> Iterator[list[str]]:
        batch, size = [], 0
        for raw in _advancing(map(spool.read, train[:count]), advance):
            batch.append(raw.decode())
            size += len(raw)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        yield batch

    return CodeTokenizer.train(batches(), spec.vocab_size), learned


def _encode(
    spool: Spool, member: int, tokenizer: CodeTokenizer, seed: int, rate: float
) -> tuple[np.ndarray, str]:
    """`BOS tokens EOS` of a document, and psm or spm if it was cut."""
    text = spool.read(member).decode()
    parts = fim.cut(text, spool.digests[member], seed, rate)
    ids = tokenizer.encode(text) if parts is None else fim.arrange(parts, tokenizer.encode)
    kind = "" if parts is None else "spm" if parts.suffix_first else "psm"
    return np.concatenate([np.array([BOS], np.uint32), ids, np.array([EOS], np.uint32)]), kind


def _existing(spec: CorpusSpec, out: Path) -> dict[str, Any] | None:
    """The index at `out` if it was made from this spec, None if there is none."""
    if not (out / INDEX).is_file():
        return None
    index = read_index(out)
    wanted, found = spec.arguments(), index["arguments"]
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ConfigError(
                f"{key}={value}: {out} holds a corpus with {key}={found.get(key)}. "
                "Fix: --force rebuilds it, or choose another --out."
            )
    return index


def _publish(spec: CorpusSpec, temporary: Path, out: Path, force: bool) -> bool:
    """Renames the finished folder into place; False if another process was faster."""
    retired = temporary.with_suffix(".retired")
    if force and out.exists():
        out.rename(retired)
    try:
        temporary.rename(out)
    except OSError:
        if retired.exists():
            retired.rename(out)
        if _existing(spec, out) is None:
            raise
        return False
    shutil.rmtree(retired, ignore_errors=True)
    return True


def _advancing(documents: Iterable[bytes], advance: Advance) -> Iterator[bytes]:
    for document in documents:
        yield document
        advance(len(document))
