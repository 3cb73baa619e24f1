"""Corpus preparation: read a source, deduplicate, split, learn a tokenizer, write shards.

The result doesn't depend on the order in which files are found: a document's split and position are
pure functions of its hash and the seed. Files are written to a temporary folder that is renamed at
the end, so a folder with an index is always complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megacpp.data import fim, specials
from megacpp.data.compressors import gzip_bits_per_byte, xz_bits_per_byte
from megacpp.data.conversations import SIMPLE, ChatTemplate, first_question, plain_text
from megacpp.data.document_store import DocumentStore
from megacpp.data.held_out import choose_held_out, sample_prompt
from megacpp.data.shards import (
    FORMAT_VERSION,
    INDEX,
    LEARNED_VERSION,
    TOKENIZER,
    SplitWriter,
    file_entry,
    read_index,
    token_dtype,
    write_index,
)
from megacpp.data.sources import Source, find_source, read_items
from megacpp.data.spec import VOCAB_SIZE, CorpusSpec
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.data.words import text_kind
from megacpp.errors import ConfigError, DataError, config_error
from megacpp.outcome import started_ticks
from megacpp.terminal.progress import Advance, Stage, progress_bars

BATCH_BYTES = 1 << 20
HOST = socket.gethostname()


@dataclass(frozen=True)
class Prepared:
    """Prepared corpus: its path, its index, and whether this call made it."""

    path: Path
    index: dict[str, Any]
    made: bool
    seconds: float


def ensure_corpus(spec: CorpusSpec, out: Path, force: bool = False) -> Prepared:
    """Make the corpus at `out`, or reuse an existing one; safe to call from several processes.

    Raises:
        ConfigError: a setting breaks a rule, or `out` holds something else.
        DataError: the source or the existing corpus can't be read.
    """
    spec.check()
    start = time.perf_counter()
    there = None if force else _existing(spec, out)
    if there is not None:
        return Prepared(out, there, False, time.perf_counter() - start)
    if out.exists() and not (out / INDEX).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise config_error("out", out, "exists and is not a corpus", "choose another --out")
    final = out.resolve()
    for old in final.parent.glob(f".{final.name}.{HOST}.*.partial"):
        owner = old.name.split(".")[-2]
        if owner.isdigit() and started_ticks(int(owner)) is None:  # killed
            shutil.rmtree(old, ignore_errors=True)
    temporary = final.with_name(f".{final.name}.{HOST}.{os.getpid()}.partial")
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


def _build(spec: CorpusSpec, folder: Path) -> None:
    """Write every file of the corpus into `folder`, the index last."""
    given = _given(spec)
    source = find_source(spec.source, spec.globs, spec.document_bytes)
    with progress_bars(keep=True) as stage, DocumentStore(folder / "documents") as store:
        counts = _read(spec, source, store, stage("reading", source.total_bytes))
        train, held_out = _split(spec, store)
        tokenizer, facts = given or _learn(spec, store, train, stage)
        if store.shown:
            tokenizer.template = tokenizer.template or SIMPLE
        tokenizer.save(folder / TOKENIZER)
        advance = stage("encoding", store.total_bytes)
        dtype = token_dtype(tokenizer.vocab_size)
        splits, cuts = {}, {"psm": 0, "spm": 0}
        for name, members, rate in (("train", train, spec.fim_rate), ("validation", held_out, 0.0)):
            writer = SplitWriter(folder, name, dtype, spec.shard_tokens)
            if store.shown:
                splits[name] = _conversations(writer, store, members, tokenizer, advance)
                continue
            for member, ids, cut in _encoded(store, members, tokenizer, spec.seed, rate):
                writer.add(ids)
                advance(store.sizes[member])
                if cut:
                    cuts[cut] += 1
            text_bytes = sum(store.sizes[member] for member in members)
            splits[name] = writer.close() | {"text_bytes": text_bytes}
        facts["changed"] = _changed(store, held_out, tokenizer)
        splits["validation"] |= _compressors(store, held_out, stage)
        prompt = sample_prompt(store.read, held_out)
        if store.shown:
            prompt = first_question(store.raw(held_out[0]))
    index = {
        "format_version": LEARNED_VERSION if store.shown else FORMAT_VERSION,
        "command": spec.command(),
        "arguments": spec.arguments(),
        "source": {
            "description": source.description,
            "files": len(source.files),
            "notes": list(source.notes),
        },
        "documents": counts | {"kept": len(train) + len(held_out)},
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "special_ids": {name: i for i, name in sorted(tokenizer.special_names.items())},
        "tokenizer": file_entry(folder / TOKENIZER) | facts,
        "fill_in_the_middle": cuts,
        "sample_prompt": prompt,
        "splits": splits,
    }
    write_index(folder, index)


def _given(spec: CorpusSpec) -> tuple[CorpusTokenizer, dict[str, Any]] | None:
    """Return the tokenizer that the spec names and its source; None if one is to be learned."""
    if not spec.tokenizer:
        return None
    path = Path(spec.tokenizer)
    path = path / TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"tokenizer={path}: no such file. Fix: give a tokenizer.json or a corpus.")
    tokenizer = CorpusTokenizer.load(path, spec.eos)
    if spec.fim_rate and tokenizer.specials.fim is None:
        rule = f"{path} has no special tokens {' '.join(specials.FIM_NAMES[0])}"
        raise config_error("fim_rate", spec.fim_rate, rule, "use --fim-rate 0")
    marks = specials.words(tokenizer.inner, tokenizer.specials)
    return tokenizer, {"given": str(path), "marks": marks}


def _read(
    spec: CorpusSpec, source: Source, store: DocumentStore, advance: Advance
) -> dict[str, int]:
    """Store new documents; return counts of read, empty, broken and duplicate ones."""
    counts = {"read": 0, "empty": 0, "invalid_utf8": 0, "duplicates": 0}
    conversations = 0
    for text, read_bytes, conversation in read_items(source, spec.field):
        counts["read"] += 1
        conversations += conversation
        if text is None:
            counts["invalid_utf8"] += 1
        elif not text:
            counts["empty"] += 1
        elif not store.add(text.encode()):
            counts["duplicates"] += 1
        advance(read_bytes)
    if conversations:
        _check_conversations(spec, conversations, counts["read"])
        store.shown = plain_text
    if len(store.digests) < 2:
        found = f"{len(store.digests)} different documents with text"
        broken = counts["invalid_utf8"]
        latin = f", {broken} are not UTF-8 (iconv -t UTF-8 converts)" if broken else ""
        raise DataError(
            f"source={spec.source}: {found}{latin}, a corpus needs 2 (one is held out). "
            "Fix: give more files, check --globs and --field, or cut files (--document-bytes 4096)."
        )
    return counts


def _check_conversations(spec: CorpusSpec, conversations: int, read: int) -> None:
    """Check that a source of conversations holds nothing else, and isn't to be cut.

    Raises:
        ConfigError: fill-in-the-middle cuts documents.
        DataError: some documents are plain texts.
    """
    if spec.fim_rate:
        raise config_error(
            "fim_rate", spec.fim_rate, "conversations aren't cut", "use --fim-rate 0"
        )
    if conversations < read:
        raise DataError(
            f"source={spec.source}: {conversations:,} of {read:,} documents are conversations. "
            "Fix: prepare the others as a corpus of their own, and mix them (--data.mix)."
        )


def _conversations(
    writer: SplitWriter,
    store: DocumentStore,
    members: Sequence[int],
    tokenizer: CorpusTokenizer,
    advance: Advance,
) -> dict[str, Any]:
    """Write a split of conversations and its mask of learned tokens; return its entry."""
    template, sizes = ChatTemplate(tokenizer), tokenizer.token_bytes_V
    mask = SplitWriter(writer.folder, f"{writer.split}-learned", "uint8", writer.shard_tokens)
    text_bytes = learned_bytes = targets = 0
    for batch in _batches(store, members):
        found = template.encode([json.loads(store.raw(i)) for i in batch])
        for member, (ids, learned) in zip(batch, found, strict=True):
            writer.add(ids)
            mask.add(learned)
            text_bytes += len(store.read(member))
            learned_bytes += int(sizes[ids[1:][learned[1:] > 0]].sum())
            targets += int(learned[1:].sum())
            advance(store.sizes[member])
    counts = {"targets": targets, "text_bytes": learned_bytes}
    return writer.close() | {"text_bytes": text_bytes, "learned": mask.close() | counts}


def _split(spec: CorpusSpec, store: DocumentStore) -> tuple[list[int], list[int]]:
    """Return the numbers of training and of held-out documents, each shuffled by (seed, hash)."""
    digests = store.digests
    held_out = choose_held_out(digests, store.sizes, spec.validation_fraction)

    def place(i: int) -> bytes:
        return hashlib.sha256(b"order\0%d\0" % spec.seed + digests[i]).digest()

    order = sorted(range(len(digests)), key=place)
    return [i for i in order if i not in held_out], [i for i in order if i in held_out]


def _learn(
    spec: CorpusSpec, store: DocumentStore, train: list[int], stage: Stage
) -> tuple[CorpusTokenizer, dict[str, Any]]:
    """Learn a tokenizer from the first training documents; return it with facts about its input."""
    ends = np.cumsum([store.sizes[i] for i in train])
    count = min(len(train), int(np.searchsorted(ends, spec.tokenizer_bytes)) + 1)
    kind, why = spec.text_kind, "given"
    if kind == "auto":
        kind, why = text_kind(store.read(i).decode() for i in train[:count])
    facts: dict[str, Any] = {"learned_documents": count, "learned_bytes": int(ends[count - 1])}
    advance = stage("learning the tokenizer", facts["learned_bytes"])

    def batches() -> Iterator[list[str]]:
        for batch in _batches(store, train[:count]):
            yield [store.read(i).decode() for i in batch]
            advance(sum(store.sizes[i] for i in batch))

    tokenizer = CorpusTokenizer.train(batches(), spec.vocab_size or VOCAB_SIZE, kind)
    return tokenizer, facts | {"text_kind": kind, "reason": why}


def _encoded(
    store: DocumentStore, members: Sequence[int], tokenizer: CorpusTokenizer, seed: int, rate: float
) -> Iterator[tuple[int, np.ndarray, str]]:
    """Yield each document as `BOS tokens EOS`, and psm or spm if it was split.

    Documents that aren't split are encoded in batches.
    """
    marks = tokenizer.specials
    begin, end = (np.array([i], np.uint32) for i in (marks.bos, marks.eos))
    for batch in _batches(store, members):
        texts = [store.read(i).decode() for i in batch]
        digests = [store.digests[i] for i in batch]
        cuts = [fim.cut(t, d, seed, rate) for t, d in zip(texts, digests, strict=True)]
        uncut = [text for text, parts in zip(texts, cuts, strict=True) if parts is None]
        whole = iter(tokenizer.encode_many(uncut))
        for member, parts in zip(batch, cuts, strict=True):
            if parts is None:
                ids, kind = next(whole), ""
            else:
                assert marks.fim is not None, "checked before the source was read"
                ids = fim.arrange(parts, tokenizer.encode, marks.fim)
                kind = "spm" if parts.suffix_first else "psm"
            yield member, np.concatenate([begin, ids, end]), kind


def _changed(store: DocumentStore, held_out: Sequence[int], tokenizer: CorpusTokenizer) -> int:
    """Return the number of held-out documents that the tokenizer doesn't reproduce exactly."""
    count = 0
    for batch in _batches(store, held_out):
        texts = [store.read(i).decode() for i in batch]
        ids = tokenizer.encode_many(texts)
        count += sum(tokenizer.decode(i.tolist()) != t for i, t in zip(ids, texts, strict=True))
    return count


def _compressors(store: DocumentStore, held_out: Sequence[int], stage: Stage) -> dict[str, Any]:
    """Return bits per byte of gzip and xz on the held-out documents."""
    total = sum(store.sizes[i] for i in held_out)
    advance = stage("gzip -9 of held-out documents", total)
    alone = gzip_bits_per_byte(_advancing(map(store.read, held_out), advance))
    advance = stage("xz -9 of held-out documents", total)
    stream, taken = xz_bits_per_byte(_advancing(map(store.read, held_out), advance), total)
    return {"gzip_bits_per_byte": alone, "xz_bits_per_byte": stream, "xz_bytes": taken}


def _batches(store: DocumentStore, members: Sequence[int]) -> Iterator[list[int]]:
    """Yield consecutive documents in groups of about BATCH_BYTES."""
    batch: list[int] = []
    size = 0
    for member in members:
        batch.append(member)
        size += store.sizes[member]
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _existing(spec: CorpusSpec, out: Path) -> dict[str, Any] | None:
    """Return the index at `out` if it was made from this spec, None if there is no index."""
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
    """Rename the finished folder into place; return False if another process was faster."""
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
