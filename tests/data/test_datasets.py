"""Data sets of the library `datasets` as sources: saved folders with their splits, and cards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.shards import fingerprint
from megacpp.data.sources import find_source
from megacpp.errors import DataError
from tests.data.reading import read_items

datasets = pytest.importorskip("datasets")

TEXTS = [f"document {n} of {n % 7} kinds" for n in range(600)]


def texts(folder: Path, field: str = "") -> list[str | None]:
    return [document.text for document in read_items(find_source(str(folder)), field)]


def test_a_saved_data_set_gives_the_corpus_of_its_texts(tmp_path: Path) -> None:
    rows = {"text": TEXTS, "id": list(range(600))}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    assert texts(tmp_path / "saved") == TEXTS
    source = find_source(str(tmp_path / "saved"))
    read = sum(document.read_bytes for document in read_items(source))
    assert source.description.endswith("(3 .arrow)") and 0 < read <= source.total_bytes
    (tmp_path / "plain").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "plain" / f"{number}.txt").write_text(text)
    made = [
        ensure_corpus(CorpusSpec(str(tmp_path / name), vocab_size=300), tmp_path / f"of_{name}")
        for name in ("saved", "plain")
    ]
    assert fingerprint(made[0].index) == fingerprint(made[1].index)


def test_a_split_is_named(tmp_path: Path) -> None:
    parts = {"train": TEXTS[:9], "test": TEXTS[9:14]}
    found = {name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()}
    datasets.DatasetDict(found).save_to_disk(tmp_path / "saved")
    message = r"splits train, test\. Fix: give one of them, .*saved/train\.$"
    with pytest.raises(DataError, match=message):
        find_source(str(tmp_path / "saved"))
    assert {name: texts(tmp_path / "saved" / name) for name in parts} == parts


def test_conversations_and_other_columns_of_a_data_set(tmp_path: Path) -> None:
    talks = {"prompt": ["Hi", "Ho"], "completion": ["A", "B"]}
    datasets.Dataset.from_dict(talks).save_to_disk(tmp_path / "talks")
    items = list(read_items(find_source(str(tmp_path / "talks"))))
    assert all(item.conversation for item in items) and '"content": "B"' in str(items[1].text)
    datasets.Dataset.from_dict({"body": ["x", None, "y"]}).save_to_disk(tmp_path / "body")
    assert texts(tmp_path / "body", "body") == ["x", "", "y"]
    with pytest.raises(DataError, match="has no column"):
        texts(tmp_path / "body")


def test_a_damaged_data_set_is_one_line(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"arrow: cannot be read .Expected to be able to read"):
        texts(tmp_path / "saved")
    file.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        texts(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"isn't that of a saved data set .*Fix: save it again"):
        texts(tmp_path / "saved")


def test_the_card_of_a_data_set_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A card")
    (tmp_path / "notes.md").write_text("notes")
    assert texts(tmp_path) == ["# A card", "notes"]
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(tmp_path / "train.parquet")
    source = find_source(str(tmp_path))
    assert texts(tmp_path) == ["notes", "a", "b"]
    assert any("skipped 1 README.md: describes the records" in note for note in source.notes)


def test_the_card_of_a_data_set_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path))
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.pipe("/cards/README.md", b"# A card")
    assert [d.text for d in read_items(find_source("memory://cards"))] == ["# A card"]
    system.pipe("/cards/data/a.jsonl", b'{"text": "a"}\n')
    assert [d.text for d in read_items(find_source("memory://cards"))] == ["a"]
    system.rm("/cards", recursive=True)


NAMES = [
    *("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"),
    *("data/test-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"),
    *("dev/part.jsonl", "latest_train.jsonl", "data/train_of_test.jsonl", "contest.jsonl"),
]
TAKEN = [name for name in NAMES if "train" in name or name == "contest.jsonl"]


@pytest.mark.parametrize("where", ["folder", "URL"])
def test_files_of_other_splits_are_no_training_texts(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder as it is downloaded from a hub: the name of a file or its folder has its split."""
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path / "cache"))
    system = pytest.importorskip("fsspec").filesystem("memory")
    for name in NAMES:
        content = f'{{"text": "{name}"}}\n'.encode()
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(content)
        system.pipe(f"/splits/{name}", content)
    folder = str(tmp_path / "set") if where == "folder" else "memory://splits"
    source = find_source(folder)
    assert {d.text for d in read_items(source)} == set(TAKEN)
    said = {"folder": "skipped 3 .jsonl: of another split than train", "URL": "3 other files are"}
    assert any(said[where] in note for note in source.notes)
    every = find_source(folder, globs=("*.jsonl",))
    assert {d.text for d in read_items(every)} == set(NAMES)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/test.jsonl").write_text('{"text": "one split alone"}')
    assert texts(tmp_path / "alone") == ["one split alone"]
    system.rm("/splits", recursive=True)


def test_a_streamed_data_set_gives_the_corpus_of_its_texts(tmp_path: Path) -> None:
    """A folder as a hub serves it, of two splits; the other one isn't read."""
    folder = tmp_path / "served"
    folder.mkdir()
    for split, some in (("train", TEXTS), ("test", ["other"])):
        table = datasets.Dataset.from_dict({"text": some})
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    url = f"datasets:{folder}:train"
    assert [d.text for d in read_items(find_source(url))] == TEXTS
    made = ensure_corpus(CorpusSpec(url, vocab_size=300), tmp_path / "streamed").index
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    saved = ensure_corpus(CorpusSpec(str(tmp_path / "saved"), vocab_size=300), tmp_path / "other")
    assert fingerprint(made) == fingerprint(saved.index)
    for end in ("", ":nothing"):
        message = r"has the splits train, test. Fix: name one, datasets:.*:train\.$"
        with pytest.raises(DataError, match=message):
            find_source(f"datasets:{folder}{end}")
    with pytest.raises(DataError, match=r"datasets can't read it .*Fix: check name"):
        find_source(f"datasets:{tmp_path}/nowhere:train")
    before = list(find_source(url).facts())
    os.utime(folder / "train-00000-of-00001.parquet", (1, 1))
    assert list(find_source(url).facts()) != before
