import json
from pathlib import Path

import pytest

from megacpp.cli.data import InspectArgs, PrepareArgs, inspect, prepare
from megacpp.config.arguments import parse_args
from megacpp.data.batches import IGNORED
from megacpp.data.corpus import Corpus
from megacpp.data.inspect import row_headline, row_text, view_rows
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.specials import BOS, EOS
from megacpp.errors import ConfigError
from tests.data.conftest import write_folder


@pytest.fixture(scope="module")
def corpus(corpus_path: Path) -> Corpus:
    return Corpus(corpus_path, 150, seed=3)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_views_are_what_training_sees(split: str, corpus: Corpus) -> None:
    views = view_rows(corpus, split, 5)
    batch_of = corpus.train_batch if split == "train" else corpus.validation_batch
    for view in views:
        batch = batch_of([view.global_row])
        assert view.ids == batch.ids_BT[0].tolist() and view.labels == batch.labels_BT[0].tolist()
        assert (view.targets, view.target_bytes) == (batch.num_targets, batch.target_bytes)
        assert view.targets + view.ignored == corpus.seq_len


def test_text_shows_boundaries_and_ignored_labels(corpus: Corpus) -> None:
    for view in view_rows(corpus, "validation", 10**6):
        text = row_text(view, corpus).plain
        shown = len(view.ids) - view.padding
        assert text.count("<bos>") == view.ids.count(BOS)
        assert text.count("<eos>×") == view.ids.count(EOS)
        assert text.count("×") == view.labels[:shown].count(IGNORED)
        assert text.count("── document") == len(set(view.documents[:shown]))
        assert text.count("continued") == (view.ids[0] != BOS)
        assert ("padding" in row_headline(view)) == (view.padding > 0)


def test_the_whole_text_comes_back(corpus: Corpus) -> None:
    """Rows joined, without the marks, are the held-out documents."""
    shown = ""
    for view in view_rows(corpus, "validation", 10**6):
        shown += corpus.tokenizer.decode_bytes(view.ids).decode("latin-1")
    texts = "".join(corpus.validation_documents())
    assert shown.encode("latin-1").decode() == texts


def test_a_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path / "source", ["int a;\x1b[31m\x07\n\tx", "\x1b]0;title\x07 [bold]y"]
    )
    ensure_corpus(CorpusSpec(str(source), vocab_size=300), tmp_path / "out")
    corpus = Corpus(tmp_path / "out", 8)
    for split in ("train", "validation"):
        for view in view_rows(corpus, split, 10):
            assert not {"\x1b", "\x07"} & set(row_text(view, corpus).plain)


def test_inspect_prints_rows(
    corpus: Corpus, corpus_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(InspectArgs(str(corpus_path), rows=2, seq_len=150))
    printed = capsys.readouterr().out
    assert corpus.fingerprint in printed
    assert "validation row 0: 150 tokens" in printed and "validation row 1:" in printed
    assert "<bos>#pragma once" in printed and "\x1b" not in printed
    inspect(InspectArgs(str(corpus_path), rows=1, split="train", seed=3, seq_len=150))
    moved = corpus.split_row(0)
    assert f"train row 0 (row {moved} of the split): 150" in capsys.readouterr().out


def test_inspect_json(
    corpus: Corpus, corpus_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(InspectArgs(str(corpus_path), rows=3, seq_len=150, json=True, verify=True))
    found = json.loads(capsys.readouterr().out)
    assert found["fingerprint"] == corpus.fingerprint and len(found["rows"]) == 3
    assert found["rows"][1]["ids"] == corpus.row("validation", 1).ids_T.tolist()
    with pytest.raises(ConfigError, match="rows=0: must be at least 1"):
        parse_args(InspectArgs, [str(corpus_path), "--rows", "0"])


def test_prepare_prints_what_it_made(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ["--source", str(source), "--out", str(out), "--vocab-size", "300", "--fim-rate", "0.5"]
    args = parse_args(PrepareArgs, flags)
    prepare(args)
    first = capsys.readouterr().out
    assert "60 documents read from 60 files: 60 kept, 0 duplicates" in first
    assert "tokenizer: 300 ids" in first and "bits per byte" in first
    prepare(args)
    assert capsys.readouterr().out.startswith(f"{out} is there [")
    prepare(parse_args(PrepareArgs, [*flags, "--json"]))
    found = json.loads(capsys.readouterr().out)
    assert found["made"] is False and found["path"] == str(out)
    assert found["fingerprint"] == Corpus(out, 8).fingerprint
    assert found["index"]["arguments"]["fim_rate"] == 0.5
    assert "out" not in found["index"]["arguments"]


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("torch-headers", "data/torch-headers"),
        ("/somewhere/llvm/", "data/llvm"),
        ("stack/code.jsonl.zst", "data/code"),
        ("code.parquet", "data/code"),
    ],
)
def test_default_folder(source: str, folder: str) -> None:
    assert PrepareArgs(source).folder() == Path(folder)
    assert PrepareArgs(source, out="x").folder() == Path("x")
