"""Corpus preparation: read a source, deduplicate, split, learn a tokenizer, write shards.

The result doesn't depend on the order in which files are found: a document's split and position are
pure functions of its hash and the seed. Files are written to a temporary folder that is renamed at
the end, so a folder with an index is always complete.

Memory is bounded for any amount of text, but for about 110 bytes a document while the order is made
and 75 after, and some hundred a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megacpp.data import specials
from megacpp.data.compressors import xz_bits_per_byte
from megacpp.data.conversations import SIMPLE, ChatTemplate, first_question
from megacpp.data.document_store import DocumentStore
from megacpp.data.encoding import COUNTS, Encoder, EncodingJob
from megacpp.data.fill_store import read_documents
from megacpp.data.held_out import choose_held_out, sample_prompt
from megacpp.data.shard_writer import SplitWriter
from megacpp.data.shards import (
    FORMAT_VERSION,
    INDEX,
    LEARNED_VERSION,
    TOKENIZER,
    file_entry,
    read_index,
    token_dtype,
    write_index,
)
from megacpp.data.sources import Source, find_source
from megacpp.data.spec import VOCAB_SIZE, CorpusSpec
from megacpp.data.tokenizer import CorpusTokenizer
from megacpp.data.unfinished import RETIRED, LeftoverError, Unfinished, claim, discard, identity
from megacpp.data.words import text_kind
from megacpp.data.workers import in_order, worker_count
from megacpp.errors import ConfigError, DataError, config_error
from megacpp.terminal.progress import Advance, Stage, progress_bars

Members = array  # numbers of documents, eight bytes each
BATCH_BYTES = 1 << 20
LEAST_BYTES = 1 << 9  # that a document counts in a batch: its ids and counts are objects


class GivenTokenizer(NamedTuple):
    """Tokenizer that the spec names, its file, and facts about it."""

    path: Path
    tokenizer: CorpusTokenizer
    facts: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """Prepared corpus: its path, its index, and whether this call made it."""

    path: Path
    index: dict[str, Any]
    made: bool
    seconds: float


def ensure_corpus(spec: CorpusSpec, out: Path, force: bool = False, workers: int = 0) -> Prepared:
    """Make the corpus at `out`, or reuse an existing one; safe to call from several processes.

    A start behind one that was killed goes on with what that one finished, and says so.

    Args:
        spec: source and settings.
        out: folder of the corpus.
        force: make it again if it is there.
        workers: processes that read and encode (0: the cores that this process may use); their
            number leaves the bytes unchanged.

    Raises:
        ConfigError: a setting breaks a rule, or `out` holds something else.
        DataError: the source or the existing corpus can't be read.
    """
    spec.check()
    start = time.perf_counter()
    final = Path(os.path.realpath(out))  # resolve() raises on a loop of links
    there = None if force else _existing(spec, out)
    if there is not None:
        discard(final)
        return Prepared(out, there, False, time.perf_counter() - start)
    if out.exists() and not (out / INDEX).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise config_error("out", out, "exists and is not a corpus", "choose another --out")
    given = _given(spec)
    source = find_source(spec.source, spec.globs, spec.document_bytes)
    if spec.globs and Path(spec.source).is_file():
        rule = f"{spec.source} is one file, and patterns choose files of a folder"
        raise config_error("globs", " ".join(spec.globs), rule, "leave it out")
    if spec.field and not source.has_records:
        rule = f"no file of {spec.source} has records"
        raise config_error("field", spec.field, rule, "leave it out")
    wanted = identity(spec, source, given.path if given else None)
    try:
        work = claim(final, wanted)
        keep = False
        try:
            try:
                _build(spec, source, given, work, workers)
            except LeftoverError as error:
                print(f"{error}: everything is made anew", file=sys.stderr, flush=True)
                work.begin(wanted)
                _build(spec, source, given, work, workers)
            made = _publish(spec, work, out, force)
        except (KeyboardInterrupt, SystemExit):
            keep = bool(work.kept())
            if keep:
                line = f"{out}: {work.kept()} stay in {work.folder}: the same command goes on there"
                print(line, file=sys.stderr, flush=True)
            raise
        finally:
            work.release(delete=not keep)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"out={out}: cannot be written ({reason}). Fix: check disk and rights."
        ) from error
    return Prepared(out, read_index(out), made, time.perf_counter() - start)


def _build(
    spec: CorpusSpec, source: Source, given: GivenTokenizer | None, work: Unfinished, workers: int
) -> None:
    """Write every file of the corpus into `work.corpus`, the index last."""
    folder = work.corpus
    with progress_bars(keep=True) as stage, DocumentStore(work.folder) as store:
        if there := work.documents:
            store.recover(there, stage("checking what is there", work.text_bytes))
        else:
            store.recover(0, lambda _: None)
        advance = stage("reading", source.total_bytes)
        counts = read_documents(spec, source, store, work, workers, advance)
        train, held_out = _split(spec, store)
        tokenizer, facts = _tokenizer(spec, given, store, train, work, stage)
        encoder = Encoder(store.path, tokenizer, store.shown is not None, spec.seed)
        advance = stage("encoding", store.total_bytes)
        dtype = token_dtype(tokenizer.vocab_size)
        splits, sums = {}, {}
        store.flush()
        for name, members in (("train", train), ("validation", held_out)):
            splits[name], sums[name] = _encode(
                spec, name, members, store, encoder, work, workers, advance
            )
        facts["changed"] = sums["validation"]["changed"]
        packed = 8 * sums["validation"]["gzip_bytes"] / sums["validation"]["text_bytes"]
        splits["validation"] |= {"gzip_bits_per_byte": packed}
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
            "bytes": source.total_bytes,
            "notes": [*source.notes, *(ChatTemplate(tokenizer).notes if store.shown else ())],
        },
        "documents": counts | {"kept": len(train) + len(held_out)},
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "special_ids": {name: i for i, name in sorted(tokenizer.special_names.items())},
        "tokenizer": file_entry(folder / TOKENIZER) | facts,
        "fill_in_the_middle": {kind: sums["train"][kind] for kind in ("psm", "spm")},
        "sample_prompt": prompt,
        "splits": splits,
    }
    write_index(folder, index)


def _given(spec: CorpusSpec) -> GivenTokenizer | None:
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
    return GivenTokenizer(path, tokenizer, {"given": str(path), "marks": marks})


def _split(spec: CorpusSpec, store: DocumentStore) -> tuple[Members, Members]:
    """Return the numbers of training and of held-out documents, each shuffled by (seed, hash)."""
    digests, salt = store.digests, b"order\0%d\0" % spec.seed
    held_out = choose_held_out(digests, store.sizes, spec.validation_fraction)
    places = (hashlib.sha256(salt + digest).digest() for digest in digests)
    order = np.argsort(np.fromiter(places, "S32", len(digests)), kind="stable")
    apart = np.zeros(len(digests), bool)
    apart[list(held_out)] = True
    train, others = order[~apart[order]], order[apart[order]]
    return array("Q", train.astype("u8").tobytes()), array("Q", others.astype("u8").tobytes())


def _tokenizer(
    spec: CorpusSpec,
    given: GivenTokenizer | None,
    store: DocumentStore,
    train: Members,
    work: Unfinished,
    stage: Stage,
) -> tuple[CorpusTokenizer, dict[str, Any]]:
    """Return the tokenizer, whose files are written, and facts about it."""
    path = work.corpus / TOKENIZER
    if work.tokenizer:
        files = work.tokenizer["files"]
        if files != _entries(work.corpus, [file["file"] for file in files]):
            raise LeftoverError(f"{path} isn't as it was written")
        tokenizer = given.tokenizer if given else CorpusTokenizer.load(path)
        if store.shown:
            tokenizer.template = tokenizer.template or SIMPLE
        return tokenizer, dict(work.tokenizer["facts"])
    tokenizer, facts = (
        (given.tokenizer, given.facts) if given else _learn(spec, store, train, stage)
    )
    if store.shown:
        tokenizer.template = tokenizer.template or SIMPLE
    tokenizer.save(path)
    names = sorted(file.name for file in work.corpus.iterdir())
    work.add_tokenizer(facts, _entries(work.corpus, names))
    return tokenizer, dict(facts)


def _entries(folder: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    return [file_entry(folder / name) for name in names if (folder / name).is_file()]


def _learn(
    spec: CorpusSpec, store: DocumentStore, train: Members, stage: Stage
) -> tuple[CorpusTokenizer, dict[str, Any]]:
    """Learn a tokenizer from the first training documents; return it with facts about its input."""
    ends = np.cumsum(np.array(store.sizes)[np.array(train)])
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


def _encode(
    spec: CorpusSpec,
    split: str,
    members: Sequence[int],
    store: DocumentStore,
    encoder: Encoder,
    work: Unfinished,
    workers: int,
    advance: Advance,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Write a split behind the shards that are there; return its entry and the sums of COUNTS."""
    names = [(split, token_dtype(encoder.tokenizer.vocab_size))]
    if encoder.talks:
        names.append((f"{split}-learned", "uint8"))
    shards = work.shards.get(split, [])
    writers = []
    for i, (name, dtype) in enumerate(names):
        done = [shard["entries"][i] for shard in shards]
        writers.append(SplitWriter(work.corpus, name, dtype, spec.shard_tokens, done))
    sums = np.array(shards[-1]["sums"] if shards else [0] * len(COUNTS), np.int64)
    first, held_out = writers[0].documents, split == "validation"
    advance(sum(store.sizes[member] for member in members[:first]))
    rate = 0.0 if held_out else spec.fim_rate
    jobs = (
        EncodingJob(
            [store.begins[i] for i in batch],
            [store.sizes[i] for i in batch],
            [store.digests[i] for i in batch],
            rate,
            held_out,
        )
        for batch in _batches(store, members[first:])
    )
    remaining = iter(members[first:])
    count = worker_count(workers, sum(store.sizes[i] for i in members[first:]))
    with contextlib.closing(in_order(encoder, jobs, count)) as batches:
        for columns, counts in itertools.chain.from_iterable(batches):
            closed = [writer.add(ids) for writer, ids in zip(writers, columns, strict=True)]
            sums += counts
            advance(store.sizes[next(remaining)])
            if closed[0]:
                work.add_shard(split, [writer.closed() for writer in writers], sums.tolist())
    total: dict[str, int] = dict(zip(COUNTS, sums.tolist(), strict=True))
    entry = writers[0].close() | {"text_bytes": total["text_bytes"]}
    if encoder.talks:
        counts = {"targets": total["targets"], "text_bytes": total["learned_bytes"]}
        entry["learned"] = writers[1].close() | counts
    return entry, total


def _compressors(store: DocumentStore, held_out: Sequence[int], stage: Stage) -> dict[str, Any]:
    """Return bits per byte of xz on the held-out documents."""
    total = sum(store.sizes[i] for i in held_out)
    advance = stage("xz -9 of held-out documents", total)
    stream, taken = xz_bits_per_byte(_advancing(map(store.read, held_out), advance), total)
    return {"xz_bits_per_byte": stream, "xz_bytes": taken}


def _batches(store: DocumentStore, members: Sequence[int]) -> Iterator[list[int]]:
    """Yield consecutive documents in groups of about BATCH_BYTES."""
    batch: list[int] = []
    size = 0
    for member in members:
        batch.append(member)
        size += max(LEAST_BYTES, store.sizes[member])
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


def _publish(spec: CorpusSpec, work: Unfinished, out: Path, force: bool) -> bool:
    """Rename the finished folder into place; return False if another process was faster."""
    retired = work.folder / RETIRED
    if force and out.exists():
        shutil.rmtree(retired, ignore_errors=True)
        out.rename(retired)
    try:
        work.corpus.rename(out)
    except OSError:
        if retired.exists():
            retired.rename(out)
        if _existing(spec, out) is None:
            raise
        return False
    return True


def _advancing(documents: Iterable[bytes], advance: Advance) -> Iterator[bytes]:
    for document in documents:
        yield document
        advance(len(document))
