"""Conversations in Parquet files: the corpus of the same JSON lines, mistakes, columns."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.data.shards import fingerprint, read_index
from megacpp.data.sources import find_source
from tests.data.chats import TALK
from tests.data.reading import read_items
from tests.data.test_conversations import question


def as_parquet(path: Path, records: list[dict]) -> Path:
    pytest.importorskip("pyarrow")
    pyarrow, parquet = (importlib.import_module(n) for n in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_parquet_is_the_corpus_of_the_same_lines(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids and learned tokens equal those of the JSONL, by the real command."""
    records: list[dict] = [{"id": n, **question(n)} for n in range(70)]
    if kind == "messages":
        pairs = [("user", "prompt"), ("assistant", "completion")]
        records = [
            {"messages": [{"role": role, "content": one[key]} for role, key in pairs], "id": n}
            for n, one in enumerate(records)
        ]
        records[3]["messages"] = TALK
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, records)))
    files = [tmp_path / "talks.jsonl", as_parquet(tmp_path / "talks.parquet", records)]
    found = []
    for file in files:
        out = tmp_path / f"of-{file.suffix[1:]}"
        assert main(["data", "prepare", str(file), "--out", str(out), "--vocab-size", "400"]) == 0
        found.append(read_index(out))
    assert "conversations" in capsys.readouterr().out or "learned" in found[0]["splits"]["train"]
    assert fingerprint(found[0]) == fingerprint(found[1])
    assert found[0]["splits"] == found[1]["splits"] and found[0]["splits"]["train"]["learned"]


def test_mistakes_in_parquet_name_the_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[dict] = [{"messages": [{"role": "user", "content": "Hi"}]}]
    path = as_parquet(tmp_path / "talks.parquet", records)
    assert main(["data", "prepare", str(path), "--out", str(tmp_path / "out")]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{path} row 0: has no message of the assistant" in err
    other = as_parquet(tmp_path / "other.parquet", [{"prompt": None, "completion": "It is."}])
    assert main(["data", "prepare", str(other), "--out", str(tmp_path / "out")]) == 3
    assert "row 0: message 1 has no text" in capsys.readouterr().err


def test_a_text_column_of_parquet_is_taken_before_messages(tmp_path: Path) -> None:
    records = [{"text": f"text {n}", "messages": TALK} for n in range(3)]
    path = as_parquet(tmp_path / "both.parquet", records)
    plain = list(read_items(find_source(str(path))))
    talks = list(read_items(find_source(str(path)), "messages"))
    assert [one.conversation for one in plain] == [False] * 3 and plain[1].text == "text 1"
    assert [one.conversation for one in talks] == [True] * 3
    assert sum(one.read_bytes for one in talks) == path.stat().st_size
