"""Commands `megacpp data prepare` and `megacpp data inspect`: make a corpus, and show its rows."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megacpp.config.settings import setting
from megacpp.data.compressors import compressor_lines
from megacpp.data.held_out import shortfall
from megacpp.data.prepare import Prepared, ensure_corpus
from megacpp.data.sources import find_source
from megacpp.data.spec import CorpusSpec
from megacpp.errors import DataError, config_error
from megacpp.urls import is_far, source_name


@dataclass(frozen=True)
class PrepareArgs(CorpusSpec):
    """Sources and settings of a corpus, and its folder."""

    out: str = setting("", "Folder of the corpus (empty: data/ and the name of the source).")
    force: bool = setting(False, "Rebuild a corpus that is there.")
    workers: int = setting(
        0,
        "Processes that read and encode (0: the cores that it may use).",
        at_least=0,
        at_most=256,
    )
    json: bool = setting(False, "Print the result as one JSON object.")

    def folder(self) -> Path:
        """Return the folder of the corpus."""
        name = source_name(self.source)
        for suffix in (".zst", ".gz", ".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".md"):
            name = name.removesuffix(suffix)
        return Path(self.out) if self.out else Path("data", name or "corpus")


@dataclass(frozen=True)
class InspectArgs:
    """Rows to show."""

    path: str = setting("data/torch-headers", "Folder of the corpus.", positional=True)
    rows: int = setting(2, "Rows that are shown.", "rows", at_least=1)
    split: Literal["train", "validation"] = setting(
        "validation", "Part of the corpus; training rows come in the order of epoch 0."
    )
    seq_len: int = setting(256, "Tokens of a row.", "tokens", at_least=1)
    seed: int = setting(42, "Seed of the order of training rows (run.seed).", at_least=0)
    verify: bool = setting(False, "Hash every file first.")
    json: bool = setting(False, "Print one JSON object: corpus, then ids and labels of each row.")


def prepare(args: PrepareArgs) -> None:
    """Make a corpus: read a source, deduplicate, split, learn a tokenizer, write token shards."""
    with _ends_cleanly():
        prepared = ensure_corpus(args, args.folder(), args.force, args.workers)
        if not prepared.made:
            _check_source(args, prepared)
    if args.json:
        print(json.dumps(_prepared_json(prepared)))
    else:
        print("\n".join(_prepared_lines(prepared)))


def _check_source(args: PrepareArgs, prepared: Prepared) -> None:
    """Check that a corpus was made from the files that its source has today, by number and size.

    Raises:
        ConfigError: it was made from others.
    """
    then = prepared.index["source"]
    if "bytes" not in then or is_far(args.source):
        return
    with contextlib.suppress(DataError):  # a corpus may outlive its source
        now = find_source(args.source, args.globs, args.document_bytes)
        if (len(now.files), now.total_bytes) != (then["files"], then["bytes"]):
            rule = (
                f"{prepared.path} was made from {then['files']:,} files of {then['bytes']:,} bytes,"
                f" and now there are {len(now.files):,} of {now.total_bytes:,}"
            )
            fix = "--force rebuilds it, or choose another --out"
            raise config_error("source", args.source, rule, fix)


def inspect(args: InspectArgs) -> None:
    """Print rows of a corpus as text with document boundaries and ignored labels."""
    from megacpp.data.corpus import Corpus
    from megacpp.data.inspect import row_headline, row_text, view_rows

    try:
        corpus = Corpus(args.path, args.seq_len, args.seed, args.verify)
    except DataError as error:  # names the setting of a run
        raise DataError(
            str(error).replace("data.seq_len", "seq_len").replace("data.seq-len", "seq-len")
        ) from None
    views = view_rows(corpus, args.split, args.rows)
    if args.json:
        head = {"path": args.path, "fingerprint": corpus.fingerprint, "describe": corpus.describe()}
        print(json.dumps({**head, "rows": [asdict(view) for view in views]}))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, file=sys.stdout)
    for line in corpus.describe():
        console.print(line, markup=False)
    for view in views:
        console.rule(style="dim")
        console.print(row_headline(view), markup=False, style="bold")
        console.print(row_text(view, corpus))


def _prepared_json(prepared: Prepared) -> dict[str, object]:
    from megacpp.data.shards import fingerprint

    return {
        "path": str(prepared.path),
        "made": prepared.made,
        "seconds": round(prepared.seconds, 3),
        "fingerprint": fingerprint(prepared.index),
        "index": prepared.index,
    }


def _prepared_lines(prepared: Prepared) -> list[str]:
    from megacpp.data.shards import fingerprint

    index, name = prepared.index, fingerprint(prepared.index)
    source, splits = index["source"], index["splits"]
    if not prepared.made:
        return [f"{prepared.path} is there [{name}]: {source['description']}", *_warnings(index)]
    counts, cuts = index["documents"], index["fill_in_the_middle"]
    lines = [
        f"{prepared.path} [{name}]: {source['description']}",
        *(f"  {note}" for note in source["notes"]),
        f"  {counts['read']:,} documents read from {source['files']:,} files: "
        f"{counts['kept']:,} kept, {counts['duplicates']:,} duplicates, {counts['empty']:,} empty, "
        f"{counts['invalid_utf8']:,} not UTF-8",
    ]
    for split, entry in splits.items():
        lines.append(
            f"  {split}: {entry['documents']:,} documents, {entry['tokens']:,} tokens, "
            f"{entry['text_bytes'] / entry['tokens']:.3f} bytes a token"
        )
    lines += [f"  {line}" for line in _tokenizer_lines(index)]
    if index["arguments"]["fim_rate"]:
        lines.append(f"  fill-in-the-middle: {cuts['psm']:,} PSM, {cuts['spm']:,} SPM")
    lines += [f"  {line}" for line in compressor_lines(splits["validation"])]
    lines.append(f"  {prepared.seconds:.1f} s")
    if (
        source["description"].startswith(("folder", "file", "data"))
        or "://" in source["description"]
    ):
        lines.append(
            f"  train on it: train.py PRESET --data.path {shlex.quote(str(prepared.path))} "
            f"--model.vocab-size {index['vocab_size']}"
        )
    return [*lines, *_warnings(index)]


def _tokenizer_lines(index: dict[str, Any]) -> list[str]:
    """Return lines about the tokenizer: its source, kind of text, marks around documents."""
    facts = index["tokenizer"]
    if "given" in facts:
        return [f"tokenizer: {index['vocab_size']:,} ids of {facts['given']}, {facts['marks']}"]
    return [
        f"tokenizer: {index['vocab_size']:,} ids, learned from {facts['learned_bytes']:,} bytes",
        f"text kind: {facts['text_kind']} ({facts['reason']})",
    ]


def _warnings(index: dict[str, Any]) -> list[str]:
    splits, facts = index["splits"], index["tokenizer"]
    held_out, train = splits["validation"], splits["train"]
    documents, size = (held_out[k] + train[k] for k in ("documents", "text_bytes"))
    lines = [shortfall(held_out["documents"], held_out["text_bytes"], documents, size)]
    broken = index["documents"]["invalid_utf8"]
    if broken:
        source = shlex.quote(index["arguments"]["source"])
        lines.append(
            f"{broken:,} document{'s' * (broken > 1)} not UTF-8 and left out. Fix: convert their "
            "files, iconv -f LATIN1 -t UTF-8. For their names: "
            f"LC_ALL=C.UTF-8 grep -rlaxv '.*' {source}"
        )
    if facts["changed"]:
        lines.append(
            f"the tokenizer changes {facts['changed']:,} of {held_out['documents']:,} held-out "
            "documents (case, blanks or letters are lost): no verdict against gzip. "
            "Fix: a byte-level tokenizer without a normalizer."
        )
    return [f"warning: {line}" for line in lines if line]


@contextlib.contextmanager
def _ends_cleanly() -> Iterator[None]:
    """Make SIGTERM unwind like Ctrl-C, so that it is said what the next start goes on with."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
