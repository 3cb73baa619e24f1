import gzip
import importlib
import json
import os
from pathlib import Path

import pytest

from megacpp.data.files import CPP_GLOBS
from megacpp.data.prepare import CorpusSpec, ensure_corpus
from megacpp.data.readers import SourceDocument
from megacpp.data.shards import fingerprint
from megacpp.data.sources import TORCH_HEADERS, find_source
from megacpp.errors import ConfigError, DataError
from tests.data.reading import read_items
from tests.figures import Record


def items(
    path: Path, field: str = "text", globs: tuple[str, ...] = CPP_GLOBS
) -> list[SourceDocument]:
    return list(read_items(find_source(str(path), globs), field))


def texts(path: Path, field: str = "text") -> list[str | None]:
    return [item.text for item in items(path, field)]


def write_jsonl(path: Path, rows: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(rows)))
    return path


def write_zst(path: Path, raw: bytes) -> Path:
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(zstandard.ZstdCompressor().compress(raw))
    return path


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    pytest.importorskip("pyarrow")
    pyarrow, parquet = (importlib.import_module(n) for n in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_the_default_source_is_in_the_installed_torch() -> None:
    source = find_source(TORCH_HEADERS, CPP_GLOBS)
    assert len(source.files) > 1000
    assert {f.suffix for f in source.files} <= {".h", ".hpp", ".cuh", ".cpp", ".cu"}
    assert source.description.startswith("torch ")


def test_patterns_are_for_folders_and_fields_for_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(ConfigError, match=r"globs=\*\.txt: .*a\.txt is one file"):
        ensure_corpus(CorpusSpec(str(tmp_path / "a.txt"), globs=("*.txt",)), tmp_path / "out")
    assert not find_source(str(tmp_path)).has_records
    write_jsonl(tmp_path / "b.jsonl", ["two"])
    assert find_source(str(tmp_path)).has_records


def test_folder_with_globs(tmp_path: Path) -> None:
    for name in ("b.h", "a.cpp", "notes.txt", "deep/er/c.cu", "deep/d.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert sorted(texts(tmp_path), key=str) == ["a.cpp", "b.h", "deep/d.h", "deep/er/c.cu"]
    assert [i.text for i in items(tmp_path, globs=("*.txt",))] == ["notes.txt"]
    assert [i.text for i in items(tmp_path, globs=("deep/*.h",))] == ["deep/d.h"]


def test_dead_links_and_pipes_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("a")
    (tmp_path / "dead.h").symlink_to(tmp_path / "nowhere.h")
    os.mkfifo(tmp_path / "pipe.h")
    assert texts(tmp_path) == ["a"]


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match=r"Permission denied: .*Fix: check the rights"):
        find_source(str(tmp_path), CPP_GLOBS)


def test_line_ends_and_marks_survive(tmp_path: Path) -> None:
    text = "\ufeffint a;\r\nint b;\n\rx\x0c"
    (tmp_path / "a.h").write_bytes(text.encode())
    assert texts(tmp_path) == [text]


def test_invalid_utf8_comes_as_none(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_bytes(b"int \xe4;")
    assert items(tmp_path) == [SourceDocument(None, 6)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n\n{"text": "\\ud800"}\n{"text": "ok"}\n')
    assert texts(path) == [None, None, "ok"]


def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert texts(path) == ["one", "two"]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet"])
def test_every_kind_gives_the_same_corpus(
    kind: str, documents: list[str], spec: CorpusSpec, corpus_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"code.{kind}"
    if kind == "parquet":
        write_parquet(path, {"id": list(range(len(documents))), "code": documents})
    else:
        write_jsonl(path, documents, "code")
    if kind == "jsonl.zst":
        write_zst(path, path.read_bytes())
    again = CorpusSpec(
        str(path),
        field="code",
        vocab_size=spec.vocab_size,
        validation_fraction=spec.validation_fraction,
        shard_tokens=spec.shard_tokens,
        seed=spec.seed,
    )
    made = ensure_corpus(again, tmp_path / "out").index
    assert fingerprint(made) == fingerprint(ensure_corpus(spec, corpus_path).index)
    size = path.stat().st_size
    assert sum(i.read_bytes for i in items(path, "code")) == pytest.approx(size, rel=0.01)


def test_capitals_in_a_suffix_are_no_other_kind(tmp_path: Path) -> None:
    """A folder counted such files as records and read them as plain text."""
    rows = ["one", "two"]
    write_jsonl(tmp_path / "A.JSONL", rows)
    write_parquet(tmp_path / "B.Parquet", {"text": rows})
    raw = (tmp_path / "A.JSONL").read_bytes()
    (tmp_path / "C.JSONL.GZ").write_bytes(gzip.compress(raw))
    assert texts(tmp_path / "A.JSONL") == texts(tmp_path / "C.JSONL.GZ") == rows
    assert [one.text for one in items(tmp_path, globs=())] == rows * 3


def test_a_folder_may_hold_records(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "one.jsonl", ["a", "b"])
    write_jsonl(tmp_path / "two.jsonl", ["c"])
    assert [i.text for i in items(tmp_path, globs=("*.jsonl",))] == ["a", "b", "c"]


def test_zst_frames_lines_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_zst(tmp_path / "a", b'{"text": "one"}\n{"text": "t').read_bytes()
    two = write_zst(tmp_path / "b", b'wo"}\n{"text": "three"}').read_bytes()
    path = tmp_path / "both.jsonl.zst"
    path.write_bytes(one + two)
    for piece_bytes in (1, 7, 1 << 20):
        monkeypatch.setattr("megacpp.data.readers.PIECE_BYTES", piece_bytes)
        assert texts(path) == ["one", "two", "three"]


def test_zst_damage_is_noticed(tmp_path: Path) -> None:
    raw = b"".join(b'{"text": "%d"}\n' % i for i in range(2000))
    path = write_zst(tmp_path / "a.jsonl.zst", raw)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: the zstd data ends early .*Fix: "):
        items(path)
    path.write_bytes(b"not zstd at all")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: corrupt zstd data .*Fix: "):
        items(path)


def test_a_null_is_an_empty_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"text": null}\n')
    assert [one.text for one in items(path)] == ["x", ""]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"z": "x", "ba": ""}',
            r"line 2: has no field 'text'\. Fix: choose --field \(use one of ba, z\)\.",
        ),
        (
            '{"texts": "x"}',
            r"line 2: has no field 'text'\. Fix: choose --field \(did you mean 'texts'\)",
        ),
        (
            '{"id": 3, "doc": {"text": "x"}, "title": "y"}',
            r"line 2: has no field 'text'\. Fix: choose --field \(use one of title\)",
        ),
        (
            '{"id": 3, "doc": {"text": "x"}}',
            r"line 2: has no field 'text'\. Fix: write the text as a field of the record",
        ),
        ('{"text": 3}', r"line 2: field 'text' is int, not text"),
        ('["x"]', r"line 2: is not a JSON object"),
        ('{"text": "x"', r"line 2: no valid JSON"),
        ("[" * 100_000, r"line 2: no valid JSON"),
    ],
)
def test_a_broken_line_is_named(
    line: str, message: str, tmp_path: Path, record_property: Record
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message) as caught:
        items(path)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    record_property("broken lines of a source named", 1)


def test_parquet_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", None, "b" * 2000], "n": [1, 2, 3]})
    assert texts(path) == ["a", "", "b" * 2000]
    with pytest.raises(
        DataError, match=r"has no column 'code'\. Fix: choose --field \(use one of n, text"
    ):
        items(path, "code")
    with pytest.raises(DataError, match=r"a\.parquet row 0: column 'n' is int, not text"):
        items(path, "n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="corrupt parquet data"):
        items(path)


@pytest.mark.parametrize(
    ("name", "library"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")]
)
def test_a_missing_library_is_one_line(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"x")
    real = importlib.import_module

    def without(wanted: str) -> object:
        if wanted.partition(".")[0] == library:
            raise ImportError(wanted)
        return real(wanted)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(DataError, match=f"reading it needs {library}. Fix: pip install {library}."):
        items(tmp_path / name)


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"source=.*nowhere: no such folder or file\. Fix: "):
        find_source(str(tmp_path / "nowhere"), CPP_GLOBS)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"no file matches \*\.h .*Fix: give other --globs"):
        find_source(str(tmp_path), CPP_GLOBS)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("x")
    source = find_source(str(tmp_path), CPP_GLOBS)
    (tmp_path / "a.h").unlink()
    with pytest.raises(DataError, match=r"a\.h: cannot be read \(No such file"):
        list(read_items(source, "text"))


def test_long_records_are_cut_by_the_rule_of_text_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ["word " * 300 + "\n\n" + "é" * 700, "short", "\U0001f600" * 500]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    source = find_source(str(path), (), 1000)
    found = list(read_items(source, "text"))
    assert "".join(item.text or "" for item in found) == "".join(rows)
    assert all(item.text and len(item.text.encode()) <= 1000 for item in found)
    assert len(found) > 6 and "short" in [item.text for item in found]
    assert sum(item.read_bytes for item in found) == path.stat().st_size
    monkeypatch.setattr("megacpp.data.readers.LINE_BYTES", 1000)
    for one in (path, write_zst(tmp_path / "rows.jsonl.zst", path.read_bytes())):
        with pytest.raises(DataError, match=r"a record of more than 1,000 bytes\. Fix: write"):
            list(read_items(find_source(str(one)), "text"))
