"""Sources at a URL: the corpus of a local folder, over a real S3 API, through breaks."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp import urls
from megacpp.data import remote
from megacpp.data.prepare import ensure_corpus
from megacpp.data.sources import find_source
from megacpp.data.spec import CorpusSpec
from megacpp.downloads import RemoteFile
from megacpp.errors import DataError
from tests.conftest import make_bucket
from tests.data.reading import read_items

fsspec = pytest.importorskip("fsspec")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urls, "WAIT_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three record files in two folders, and what nobody asked for."""
    top = tmp_path / "texts"
    (top / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.jsonl", "b.jsonl", "deep/c.jsonl")):
        texts = [f"{name} has the document {i}, {'long ' * (20 + number)}" for i in range(40)]
        (top / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (top / "picture.png").write_bytes(b"\0\1")
    return top


@pytest.fixture
def there(folder: Path) -> Iterator[str]:
    """URL of those files in the memory of fsspec."""
    system = fsspec.filesystem("memory")
    for path in (p for p in folder.rglob("*") if p.is_file()):
        system.pipe(f"/texts/{path.relative_to(folder)}", path.read_bytes())
    yield "memory://texts"
    system.rm("/texts", recursive=True)


def texts(url: str) -> list[str | None]:
    return [document.text for document in read_items(find_source(url))]


def shards(corpus: Path) -> dict[str, str]:
    found = [*sorted(corpus.glob("*.bin")), corpus / "tokenizer.json"]
    assert len(found) > 2
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def test_a_bucket_gives_the_corpus_of_the_folder(
    folder: Path, s3: dict[str, str], tmp_path: Path
) -> None:
    """The command against a real API: reads MD5s from ETags, and a second time fetches nothing."""
    client = make_bucket("corpora", s3)
    for path in (p for p in folder.rglob("*") if p.is_file()):
        client.upload_file(str(path), "corpora", f"texts/{path.relative_to(folder)}")
    out, sizes = tmp_path / "from_s3", []
    for _ in range(2):
        words = ["data", "prepare", "s3://corpora/texts", "--out", str(out), "--force"]
        done = subprocess.run(
            [sys.executable, "-m", "megacpp", *words, "--vocab-size", "300"],
            cwd=ROOT, env=os.environ | s3, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "1 other files are not taken" in done.stdout and "120 documents" in done.stdout
        copies = sorted((tmp_path / "cache/remote").iterdir())
        sizes.append([(path.name, path.stat().st_ino) for path in copies])
    assert len(sizes[0]) == 3 and sizes[0] == sizes[1]
    local = tmp_path / "local"
    ensure_corpus(CorpusSpec(str(folder), globs=("*.jsonl",), vocab_size=300), local)
    assert shards(out) == shards(local)


def test_an_empty_bucket_is_one_line(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=r"source=s3://nowhere/x: .*Fix: check the URL"):
        find_source("s3://nowhere/x")


class Breaking:
    """A file system whose files break off after some bytes, or hold others."""

    def __init__(self, system: Any, after: int = 100, breaks: int = 3, flip: bool = False) -> None:
        self.system, self.after, self.breaks, self.flip = system, after, breaks, flip
        self.read = 0

    def open(self, name: str, mode: str) -> io.BytesIO:
        outer = self

        class File(io.BytesIO):
            given = 0

            def read(self, size: int | None = -1) -> bytes:
                if outer.breaks and self.given >= outer.after:
                    outer.breaks -= 1
                    raise ConnectionError("reset by peer")
                piece = super().read(outer.after if outer.breaks else size)
                self.given += len(piece)
                outer.read += len(piece)
                return piece[:-1] + b"?" if outer.flip and piece else piece

        assert mode == "rb"
        return File(self.system.cat(name))


def through(url: str, **how: Any) -> tuple[remote.RemoteFiles, Breaking]:
    found = remote.remote_files(url)
    system = Breaking(found.system, **how)
    return remote.RemoteFiles(url, system, found.files, found.skipped), system


def test_a_broken_download_goes_on_where_it_ended(there: str, folder: Path) -> None:
    found, system = through(there)
    want = [(folder / name).read_bytes() for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl")]
    assert [path.read_bytes() for path in found.fetched()] == want
    assert system.breaks == 0 and system.read == sum(map(len, want))  # nothing twice


def test_what_came_serves_the_next_start(there: str) -> None:
    found, _ = through(there, breaks=99)
    with pytest.raises(DataError, match=r"5 attempts \(ConnectionError: reset by peer\)"):
        list(found.fetched())
    assert found.files[0].local.with_name(f"{found.files[0].local.name}.part").stat().st_size == 500
    again, system = through(there, breaks=0)
    assert len(list(again.fetched())) == 3
    assert system.read == sum(file.bytes or 0 for file in found.files) - 500


def test_other_bytes_than_announced_are_refused(there: str, folder: Path) -> None:
    found, _ = through(there, breaks=0, flip=True)
    md5 = hashlib.md5((folder / "a.jsonl").read_bytes()).hexdigest()
    one = RemoteFile(found.files[0].name, found.files[0].bytes, md5)
    with pytest.raises(DataError, match=r"WrongBytesError: .*a.jsonl: is corrupt .MD5 differs"):
        list(remote.RemoteFiles(there, found.system, (one,), 0).fetched())
    assert not one.local.exists()


def test_a_changed_file_is_fetched_again(there: str) -> None:
    before = texts(there)
    assert texts(there) == before
    system = fsspec.filesystem("memory")
    system.pipe("/texts/a.jsonl", json.dumps({"text": "new"}).encode())
    assert texts(there) == ["new", *before[40:]]


def test_the_cache_is_bounded(there: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "MOST_BYTES", 1)
    assert len(texts(there)) == 120
    assert list((tmp_path / "cache/remote").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nothing://here", "Protocol not known"),
        ("memory://nowhere", "can't be listed .FileNotFoundError: /nowhere."),
    ],
)
def test_a_wrong_url_is_one_line(url: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        find_source(url)
    assert "\n" not in str(caught.value) and "Fix:" in str(caught.value)
