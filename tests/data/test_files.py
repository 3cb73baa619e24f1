"""Which files of a folder are taken, and what is said about the others."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from megacpp.cli.main import main
from megacpp.data.files import choose_files
from megacpp.data.sources import find_source
from megacpp.errors import DataError
from tests.data.reading import read_items


def write(folder: Path, names: dict[str, bytes]) -> Path:
    for name, raw in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


def test_a_folder_of_texts_with_pictures(tmp_path: Path) -> None:
    names = {f"{i}.txt": b"text %d" % i for i in range(80)}
    names |= {f"{i}.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" for i in range(3)}
    chosen = choose_files(write(tmp_path, names), ())
    assert len(chosen.files) == 80 and {f.suffix for f in chosen.files} == {".txt"}
    assert chosen.taken == "80 .txt files"
    assert chosen.skipped == ["skipped 3 .png: not text"]


def test_everything_that_is_text_is_taken(tmp_path: Path) -> None:
    names = {"a.md": b"#", "b.txt": b"b", "LICENSE": b"mit", "c.h": b"int c;", "deep/d.md": b"d"}
    names |= {"t.jsonl": b'{"text": "t"}\n', "t.jsonl.gz": gzip.compress(b'{"text": "u"}\n')}
    names |= {".git/HEAD": b"ref", ".hidden.txt": b"h", "x.json": b"{}", "y.csv": b"1,2"}
    names |= {"z.csv": b"1,2", "empty.txt": b"", "latin.txt": b"gr\xfc\xdfe"}
    folder = write(tmp_path, names)
    source = find_source(str(folder))
    assert [i.text for i in read_items(source)] == [
        "mit", "#", "b", "int c;", "", None, "t", "u", "d"
    ]  # fmt: skip
    assert "(3 .txt, 2 .md, 1 LICENSE, 1 .h and 2 other files)" in source.description
    assert source.notes == (
        "skipped 2 .csv, 1 .json: data, --globs '*.json' takes it",
        "skipped 2 hidden",
    )
    assert [f.name for f in find_source(str(folder), ("*.json",)).files] == ["x.json"]


def test_utf16_is_named_and_not_read(tmp_path: Path) -> None:
    names = {"a.txt": "wide".encode("utf-16"), "b.txt": b"plain", "c.bin": b"\1\0"}
    folder = write(tmp_path, names)
    chosen = choose_files(folder, ())
    assert [f.name for f in chosen.files] == ["b.txt"]
    assert chosen.skipped == [
        "skipped 1 .txt: UTF-16, convert them (iconv -f UTF-16 -t UTF-8)",
        "skipped 1 .bin: not text",
    ]
    for name, why in (("a.txt", "UTF-16, .* iconv -f UTF-16"), ("c.bin", "not text")):
        with pytest.raises(DataError, match=rf"{name}: is {why}"):
            find_source(str(folder / name))


def test_a_folder_without_text(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.png": b"\0", "b.json": b"{}"})
    with pytest.raises(DataError) as caught:
        choose_files(folder, ())
    assert str(caught.value) == (
        f"source={folder}: holds no text file (skipped 1 .json: data, --globs '*.json' takes it; "
        "skipped 1 .png: not text). Fix: give a folder with .txt, .jsonl or .parquet files, "
        "or name yours with --globs '*.x'."
    )


def test_a_lone_text_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i}. " + "Größe und Maß. " * (i % 30) for i in range(4000)]
    text = "\n\n".join(paragraphs)
    path = tmp_path / "book.txt"
    path.write_text(text)
    source = find_source(str(path))
    size = path.stat().st_size
    longest = max(2048, size // 1024)
    assert source.notes == (
        f"one text file: cut at blank lines into documents of up to {longest:,} bytes",
    )
    items = list(read_items(source))
    texts = [item.text or "" for item in items]
    assert "".join(texts) == text and sum(item.read_bytes for item in items) == size
    assert all(t.endswith("\n\n") for t in texts[:-1])
    assert all(longest // 2 <= len(t.encode()) <= longest for t in texts[:-1])


@pytest.mark.parametrize("text", ["语言模型" * 500, "word " * 900, "line\r\n" * 700, "é" * 3000])
@pytest.mark.parametrize("longest", [7, 100, 1001])
def test_a_cut_never_splits_a_character(text: str, longest: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    texts = [i.text for i in read_items(find_source(str(tmp_path), (), longest))]
    assert None not in texts and "".join(map(str, texts)) == text
    assert all(0 < len(str(t).encode()) <= longest for t in texts)


def test_long_files_of_a_folder_are_cut_and_counted(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.txt": b"a\n\n" * 100, "b.txt": b"b"})
    source = find_source(str(folder), (), 200)
    assert source.notes == ("1 files above 200 bytes are cut at blank lines",)
    assert [len(str(i.text)) for i in read_items(source)] == [198, 102, 1]


@pytest.mark.parametrize("field", ["text", "content"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_field_is_found(field: str, name: str, tmp_path: Path) -> None:
    raw = b"".join(json.dumps({"id": i, field: f"t{i}"}).encode() + b"\n" for i in range(300))
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    source = find_source(str(tmp_path / name))
    items = list(read_items(source))
    assert [i.text for i in items] == [f"t{i}" for i in range(300)]
    assert sum(i.read_bytes for i in items) <= source.total_bytes
    with pytest.raises(DataError, match=r"line 1: has no field 'body'\. Fix: choose --field"):
        list(read_items(source, "body"))


def test_damaged_gzip_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(3000)))
    for raw, words in ((whole[:-20], "ends early"), (b"not gzip", "corrupt gzip data")):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=rf"a\.jsonl\.gz: .*{words}.*Fix: copy it again\.$"):
            list(read_items(find_source(str(path))))


def test_files_that_are_not_utf8_are_found_and_converted_as_the_warning_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {f"{n}.txt": f"Text {n}".encode() for n in range(9)}
    folder = write(tmp_path / "some texts", names | {"latin.txt": b"gr\xfc\xdfe"})
    command = ["data", "prepare", str(folder), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "not UTF-8 and left" in x)
    convert, find = line.partition("files, ")[2].split(". For their names: ")
    found = subprocess.run(find, shell=True, capture_output=True, text=True).stdout.split("\n")
    assert found == [str(folder / "latin.txt"), ""]
    made = subprocess.run([*convert.split(), found[0]], capture_output=True)
    assert made.stdout.decode() == "grüße"


def test_ndjson_and_json_files_hold_records(tmp_path: Path) -> None:
    rows = [{"text": "eins"}, {"text": "zwei"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    names = {"a.ndjson": lines, "b.ndjson.gz": gzip.compress(lines), "c.json": lines}
    names |= {"d.json": b"\xef\xbb\xbf" + json.dumps(rows, indent=2).encode()}
    folder = write(tmp_path, names)
    for name in names:
        source = find_source(str(folder / name))
        assert [i.text for i in read_items(source)] == ["eins", "zwei"], name
        assert source.has_records
        assert sum(i.read_bytes for i in read_items(source)) == source.total_bytes, name
    assert [f.name for f in find_source(str(folder)).files] == ["a.ndjson", "b.ndjson.gz"]
    taken = find_source(str(folder), ("*.json",))
    assert [i.text for i in read_items(taken)] == ["eins", "zwei"] * 2


def test_a_json_file_without_records(tmp_path: Path) -> None:
    names = {"one.json": b'{\n "name": "x"\n}\n', "numbers.json": b"[1, 2]", "bad.json": b"[{]"}
    folder = write(
        tmp_path, names | {"mixed.json": b'[{"text": "a"}, 3]', "none.json": b'[{"b": "1"}]'}
    )
    for name in ("one.json", "numbers.json"):
        with pytest.raises(DataError, match=rf"{name}: is neither an array of objects nor one obj"):
            find_source(str(folder / name))
    chosen = find_source(str(folder), ("one.json", "numbers.json"))  # texts, as of a code corpus
    assert not chosen.has_records and len(list(read_items(chosen))) == 2
    for name, rule in (
        ("bad.json", r"bad.json: no valid JSON"),
        ("mixed.json", r"mixed.json record 2: is not a JSON object"),
        ("none.json", r"none.json record 1: has no field 'text' or 'content'. Fix: choose --field"),
        ("none.json", r"; a copy named .txt is learned as it stands\.$"),
    ):
        with pytest.raises(DataError, match=rule):
            list(read_items(find_source(str(folder / name))))


@pytest.mark.parametrize("name", ["bad.json", "bad.txt"])
def test_a_file_that_cant_be_read_is_one_of_the_data(tmp_path: Path, name: str) -> None:
    """Read as from a disk that fails: the start of a process's memory isn't mapped."""
    (tmp_path / name).symlink_to("/proc/self/mem")
    for source, globs in ((tmp_path / name, ()), (tmp_path, (f"*{name[3:]}",))):
        with pytest.raises(DataError) as caught:
            list(read_items(find_source(str(source), globs)))
        assert str(caught.value) == (
            f"{tmp_path / name}: cannot be read (Input/output error). Fix: check the file."
        )


def test_packed_texts_are_refused_by_name(tmp_path: Path) -> None:
    packed = gzip.compress(b"a text\n" * 99)
    folder = write(tmp_path, {"my text.txt.gz": packed, "b.txt": b"b"})
    with pytest.raises(DataError) as caught:
        list(read_items(find_source(str(folder / "my text.txt.gz"))))
    assert str(caught.value) == (
        f"{folder}/my text.txt.gz: is a packed text, and of packed files only .jsonl and "
        f".ndjson with .gz or .zst are read. Fix: unpack it, `gunzip -k '{folder}/my text.txt.gz'`."
    )
    source = find_source(str(folder))
    assert [f.name for f in source.files] == ["b.txt"]
    assert source.notes == ("skipped 1 .gz: packed, unpack them first (gunzip -k)",)
