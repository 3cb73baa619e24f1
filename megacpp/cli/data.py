"""`megacpp data prepare | inspect`: make a corpus, and look at its rows."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megacpp.data.prepare import CorpusSpec, Prepared, ensure_corpus
from megacpp.settings import setting


@dataclass(frozen=True)
class PrepareArgs(CorpusSpec):
    """What goes into a corpus, and where it goes."""

    out: str = setting("", "Folder of the corpus (empty: data/ and the name of the source).")
    force: bool = setting(False, "Rebuild a corpus that is there.")
    json: bool = setting(False, "Print the result as one JSON object.")

    def folder(self) -> Path:
        """Where the corpus goes."""
        name = Path(self.source).name
        for suffix in (".zst", ".jsonl", ".parquet"):
            name = name.removesuffix(suffix)
        return Path(self.out) if self.out else Path("data", name or "corpus")


@dataclass(frozen=True)
class InspectArgs:
    """Which rows."""

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
    prepared = ensure_corpus(args, args.folder(), args.force)
    if args.json:
        print(json.dumps(_prepared_json(prepared)))
    else:
        print("\n".join(_prepared_lines(prepared)))


def inspect(args: InspectArgs) -> None:
    """Print rows of a corpus as text with document boundaries and ignored labels."""
    from megacpp.data.batches import Corpus
    from megacpp.data.inspect import as_json, row_headline, row_text, view_rows

    corpus = Corpus(args.path, args.seq_len, args.seed, args.verify)
    views = view_rows(corpus, args.split, args.rows)
    if args.json:
        head = {"path": args.path, "fingerprint": corpus.fingerprint, "describe": corpus.describe()}
        print(json.dumps({**head, "rows": as_json(views)}))
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

    index = prepared.index
    counts, splits, print_ = index["documents"], index["splits"], fingerprint(index)
    if not prepared.made:
        return [f"{prepared.path} is there [{print_}]: {index['source']['description']}"]
    cuts = index["fill_in_the_middle"]
    lines = [
        f"{prepared.path} [{print_}]: {index['source']['description']}",
        f"  {counts['read']:,} documents read from {index['source']['files']:,} files: "
        f"{counts['kept']:,} kept, {counts['duplicates']:,} duplicates, {counts['empty']:,} empty, "
        f"{counts['invalid_utf8']:,} not UTF-8",
    ]
    for name, split in splits.items():
        lines.append(
            f"  {name}: {split['documents']:,} documents, {split['tokens']:,} tokens, "
            f"{split['text_bytes'] / split['tokens']:.3f} bytes a token"
        )
    lines.append(
        f"  tokenizer: {index['vocab_size']:,} ids, learned from "
        f"{index['tokenizer']['learned_bytes']:,} bytes; fill-in-the-middle: "
        f"{cuts['psm']:,} PSM, {cuts['spm']:,} SPM"
    )
    figure = splits["validation"]["gzip_bits_per_byte"]
    lines.append(f"  gzip -9 of held-out documents: {figure:.3f} bits per byte")
    lines.append(f"  {prepared.seconds:.1f} s")
    return lines
