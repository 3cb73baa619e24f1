"""Folder with a finished run, its corpus, and damaged copies of both."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(scope="session")
def place(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run, its corpus, and damaged copies of both."""
    from tests.launch import forked

    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(corpus, folder / "CORPUS")
    small = "--model.dim 32 --model.depth 1 --model.pattern F --data.seq-len 64 --run.steps 2"
    flags = f"{small} --data.path {corpus} --model.vocab-size 400 --run.dir {folder / 'RUN'}"
    umask = os.umask(0o027)
    try:
        done = forked("tiny", *flags.split(), "--run.sample-tokens", "2")
    finally:
        os.umask(umask)
    assert done.returncode == 0, done.stderr
    text = (folder / "RUN/config.json").read_text()
    for name, content in {
        "half": text[: len(text) // 2],
        "binary": bytes(range(256)),
        "deep": "[" * 100_000,
        "list": "[]",
        "missing": None,
        "words": text.replace('"dim": 32', '"dim": "wide"'),
        "negative": text.replace('"dim": 32', '"dim": -32'),
        "older": text.replace('"init_std"', '"init_deviation"'),
    }.items():
        _copy(folder / "RUN", f"RUN_{name}", "config.json", content)
    manifest = json.loads((folder / "RUN/final/manifest.json").read_text())
    _copy(folder / "RUN", "RUN_manifest", "final/manifest.json", "[" * 100_000)
    other = json.dumps({**manifest, "version": 9})
    _copy(folder / "RUN", "RUN_version", "final/manifest.json", other)
    _copy(folder / "RUN", "RUN_weights", "final/model.safetensors", "short")
    text = (folder / "CORPUS/index.json").read_text()
    for name, content in {
        "half": text[:500],
        "binary": bytes(range(256)),
        "deep": "[" * 100_000,
        "list": "[]",
        "version": re.sub(r'"format_version": \d', '"format_version": 9', text),
    }.items():
        _copy(folder / "CORPUS", f"CORPUS_{name}", "index.json", content)
    _copy(folder / "CORPUS", "CORPUS_shard", "train-00000.bin", "")
    _copy(folder / "CORPUS", "CORPUS_tokenizer", "tokenizer.json", "{}")
    for name, content in {
        "EMPTY": b"",
        "BINARY": bytes(range(256)),
        "DEEP": b"[" * 100_000,
    }.items():
        (folder / name).write_bytes(content)
    for name, content in {
        "empty.json": b"",
        "binary.toml": bytes(range(256)),
        "deep.json": b"[" * 100_000,
        "digits.json": b'{"model.dim": ' + b"9" * 5000 + b"}",
        "list.json": b"[]",
        "presets.json": b'{"preset": ["tiny"]}',
        "odd.json": b'{"a\\nb": 1}',
        "far.toml": b"model.dim = 99999999999999999999",
        "section.toml": b"model = 3",
        "range.toml": b"[model]\ndim = -8",
        "mesh.toml": b"mesh.tp = 3",
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder.toml").mkdir()
    (folder / "FOLDER").mkdir()
    (folder / "FULL").mkdir()
    (folder / "FULL/notes").write_text("mine")
    (folder / "SOURCE").mkdir()
    for number in range(4):
        (folder / f"SOURCE/{number}.h").write_text(f"int a{number};\n" * 40)
    return folder


def _copy(source: Path, name: str, file: str, content: str | bytes | None) -> None:
    """`source` beside itself as `name`, with one file replaced (None: removed)."""
    path = shutil.copytree(source, source.with_name(name)) / file
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def untouched(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Called from `place`, which stays as it is; no process group is started."""
    monkeypatch.chdir(place)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = _listed(place)
    yield
    assert _listed(place) == before and not dist.is_initialized()


def _listed(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
