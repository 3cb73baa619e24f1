"""Manifest (manifest.json): the content of a saved folder, with size and SHA-256 of every file.

The manifest contains its own digest, so a flipped bit anywhere in the folder is found before any
tensor is read. It proves integrity, not origin: who can write the folder can replace the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megacpp.state.files import write_text

NAME = "manifest.json"
VERSION = 1


class DamagedError(Exception):
    """Problem of a saved folder, naming the file; callers add the fix."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """Dtype (such as `float32`) and global shape of a tensor."""

    dtype: str
    shape: list[int]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch's dtype object."""
        return getattr(torch, self.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class Manifest:
    """Content of a saved folder; files by name, without subfolders."""

    kind: Literal["checkpoint", "export"]
    step: int
    world_size: int
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    version: int = VERSION


def describe(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return dtype and global shape of every tensor."""
    return {
        name: TensorEntry(str(t.dtype).removeprefix("torch."), list(t.shape))
        for name, t in tensors.items()
    }


def hash_file(path: Path) -> FileEntry:
    """Return size and SHA-256 of a file, reading it once."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json atomically and sync it to disk."""
    write_text(folder / NAME, _to_text(dataclasses.asdict(manifest)))


def read_manifest(folder: Path, kind: str) -> Manifest:
    """Read and check manifest.json.

    Raises:
        DamagedError: no such folder, unfinished, unreadable, changed, of another version or kind.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise DamagedError(f"{folder}: no such folder")
    if not path.is_file():
        raise DamagedError(f"{folder}: has no {NAME}, so it is unfinished or no {kind}")
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
        del content["sha256"]
        version = content["version"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        raise DamagedError(f"{path}: is unreadable (truncated or corrupt)") from None
    if version != VERSION:
        raise DamagedError(f"{path}: has format version {version}, this megacpp reads {VERSION}")
    if raw != _to_text(content).encode():
        raise DamagedError(f"{path}: is corrupt (SHA-256 differs)")
    if content["kind"] != kind:
        raise DamagedError(f"{path}: is of the kind {content['kind']!r}, not {kind!r}")
    return _from_json(content)


def file_problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Read the named files and return those missing, truncated or corrupt, one line each."""
    found = []
    for name in names:
        path, entry = folder / name, manifest.files[name]
        if not path.is_file():
            found.append(f"{path}: is missing")
        elif path.stat().st_size != entry.bytes:
            size = path.stat().st_size
            found.append(f"{path}: has {size:,} bytes instead of {entry.bytes:,}")
        elif hash_file(path) != entry:
            found.append(f"{path}: is corrupt (SHA-256 differs)")
    return found


def stray_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Return tensor files missing from the manifest: a reader of the folder would load them."""
    known = manifest.files.keys()
    strays = sorted(p for p in folder.glob("*.safetensors") if p.name not in known)
    return [f"{path}: is not in {NAME}" for path in strays]


def _from_json(content: Mapping[str, Any]) -> Manifest:
    tensors = {name: TensorEntry(**entry) for name, entry in content["tensors"].items()}
    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    for name in files:
        if Path(name).name != name or name in ("", ".."):
            raise DamagedError(f"{NAME}: names the file {name!r} outside of its folder")
    return Manifest(**{**content, "tensors": tensors, "files": files})


def _to_text(content: Mapping[str, Any]) -> str:
    """Return the canonical text of a manifest, including its digest."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"
