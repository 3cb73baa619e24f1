"""Protocols of URLs: each opens its own package's file system, and a missing package is named."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megacpp.data.sources import find_source
from megacpp.errors import DataError
from megacpp.urls import PACKAGES
from tests.data.reading import read_items

fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
_registry = pytest.importorskip("fsspec.registry")._registry

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=sorted(PACKAGES))
def protocol(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield a protocol whose class nothing has imported or replaced yet."""
    before = dict(_registry)
    _registry.pop(request.param, None)
    yield request.param
    _registry.clear()
    _registry.update(before)


def test_a_source_is_read_through_the_class_of_its_protocol(
    protocol: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in is registered for the protocol; the file comes by it, and by no other."""
    monkeypatch.setenv("MEGACPP_CACHE", str(tmp_path))
    opened: list[str] = []

    class StandIn(MemoryFileSystem):
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        def _open(self, path: str, *args: Any, **more: Any) -> Any:
            opened.append(path)
            return super()._open(path, *args, **more)

    StandIn.protocol = protocol  # type: ignore[assignment]
    fsspec.register_implementation(protocol, StandIn, clobber=True)
    StandIn().pipe_file("/texts/a.jsonl", b'{"text": "found"}\n')
    monkeypatch.setattr(StandIn, "_strip_protocol", classmethod(_path))
    found = find_source(f"{protocol}://texts")
    opened.clear()
    assert [document.text for document in read_items(found)] == ["found"]
    assert opened == ["/texts/a.jsonl"]


def _path(cls: type, path: str) -> str:
    return "/" + path.partition("://")[2].strip("/") if "://" in path else path


def test_a_missing_package_is_named_with_what_installs_it(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PACKAGES[protocol]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    with pytest.raises(DataError) as caught:
        find_source(f"{protocol}://texts")
    assert str(caught.value) == (
        f"source={protocol}://texts: {protocol}:// needs the package {package}, which can't be "
        "imported. Fix: pip install 'megacpp[remote]'."
    )


def test_the_extra_has_every_package() -> None:
    """Under the names of fsspec's own extras, where it has one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = " ".join(extras["optional-dependencies"]["remote"])
    by_extra = {"s3fs": "s3", "gcsfs": "gs", "aiohttp": "http"}
    for package in PACKAGES.values():
        assert by_extra.get(package, package) in words
