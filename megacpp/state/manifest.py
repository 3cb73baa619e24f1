"""Manifest (manifest.json): the content of a saved folder, with size and SHA-256 of every file.

The manifest contains its own digest, so a flipped bit anywhere in the folder is found before any
tensor is read. It proves integrity, not origin: who can write the folder can replace the manifest.
So its values are checked as well, and every other file is read only after its hash. No torch import
here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megacpp.errors import shortened
from megacpp.state.files import write_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NAME = "manifest.json"
VERSION = 1
MOST_BYTES = 1 << 26  # of a manifest: 100 bytes a tensor
MOST_NUMBER = 1 << 62
# Types that safetensors stores, by torch's names, with their bytes.
DTYPES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
}
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError)


class DamagedError(Exception):
    """Problem of a saved folder, naming the file; callers add the fix."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of a file."""

    bytes: int
    sha256: str


# Hash that a file should have, its inode, size and times: a write or another file changes them.
Stamp = tuple[str, int, int, int, int]
Seen = dict[Path, Stamp]


@dataclass(frozen=True)
class TensorEntry:
    """Dtype (such as `float32`) and global shape of a tensor."""

    dtype: str
    shape: list[int]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch's dtype object."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * DTYPES[self.dtype]

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
        if path.stat().st_size > MOST_BYTES:
            raise DamagedError(f"{path}: is over {MOST_BYTES:,} bytes, no manifest is")
        raw = path.read_bytes()
    except UNREADABLE:
        raise DamagedError(f"{path}: is unreadable (truncated or corrupt)") from None
    return parse_manifest(path, raw, kind)


def parse_manifest(path: Path | str, raw: bytes, kind: str) -> Manifest:
    """Return the manifest in the content of a file; `path` names it in errors.

    Raises:
        DamagedError: unreadable, changed, of another version or kind.
    """
    try:
        content = json.loads(raw)
        del content["sha256"]
        version = content["version"]
        same = raw == _to_text(content).encode()
    except UNREADABLE:
        raise DamagedError(f"{path}: is unreadable (truncated or corrupt)") from None
    if type(version) is int and version != VERSION:
        raise DamagedError(f"{path}: has format version {version}, this megacpp reads {VERSION}")
    if not same:
        raise DamagedError(f"{path}: is corrupt (SHA-256 differs)")
    if content.get("kind") != kind:
        raise DamagedError(f"{path}: is of the kind {content.get('kind')!r}, not {kind!r}")
    try:
        return _from_json(content)
    except UNREADABLE as error:
        raise DamagedError(f"{path}: is no manifest ({error})") from None


def read_json(folder: Path, name: str, manifest: Manifest) -> Any:
    """Return the content of a JSON file, after its size and hash.

    Raises:
        DamagedError: the file isn't in the manifest, is missing, changed or no JSON.
    """
    if name not in manifest.files:
        raise DamagedError(f"{folder / name}: is not in {NAME}")
    for problem in file_problems(folder, manifest, [name]):
        raise DamagedError(problem)
    try:
        return json.loads((folder / name).read_bytes())
    except UNREADABLE:
        raise DamagedError(f"{folder / name}: is no JSON that can be read") from None


def file_problems(
    folder: Path, manifest: Manifest, names: Iterable[str], seen: Seen | None = None
) -> list[str]:
    """Return the named files that are missing, truncated or corrupt, one line each.

    Args:
        folder: folder of the files.
        manifest: their sizes and hashes.
        names: files to check.
        seen: files that had their hashes before; they are read again only once they have changed,
            and files that have their hashes now are added. None: all are read.
    """
    found = []
    for name in names:
        path, entry = folder / name, manifest.files[name]
        if not path.is_file():
            what = "is no regular file" if path.exists() else "is missing"
            found.append(f"{path}: {what}")
        elif path.stat().st_size != entry.bytes:
            size = path.stat().st_size
            found.append(f"{path}: has {size:,} bytes instead of {entry.bytes:,}")
        elif seen is None or seen.get(path) != (stamp := _stamp(path, entry)):
            if hash_file(path) != entry:
                found.append(f"{path}: is corrupt (SHA-256 differs)")
            elif seen is not None:
                seen[path] = stamp
    return found


def stray_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Return tensor files missing from the manifest: a reader of the folder would load them."""
    known = manifest.files.keys()
    strays = sorted(p for p in folder.glob("*.safetensors") if p.name not in known)
    return [f"{path}: is not in {NAME}" for path in strays]


def whole_number(value: Any, least: int = 0) -> int:
    """Return an integer of a saved file.

    Raises:
        ValueError: another type, or out of range.
    """
    if type(value) is not int or not least <= value < MOST_NUMBER:
        raise ValueError(f"{shortened(value)} is no whole number from {least}")
    return value


def _stamp(path: Path, entry: FileEntry) -> Stamp:
    found = path.stat()
    return entry.sha256, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _from_json(content: Mapping[str, Any]) -> Manifest:
    tensors = {name: _tensor(**entry) for name, entry in content["tensors"].items()}
    files = {name: _file(**entry) for name, entry in content["files"].items()}
    for name in files:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise DamagedError(f"{NAME}: names the file {name!r} outside of its folder")
    whole_number(content["step"])
    whole_number(content["world_size"], 1)
    return Manifest(**{**content, "tensors": tensors, "files": files})


def _tensor(dtype: Any, shape: Any) -> TensorEntry:
    if dtype not in DTYPES or not isinstance(shape, list):
        raise ValueError(f"{shortened(dtype)} is no type of a tensor")
    whole_number(math.prod(whole_number(size) for size in shape))
    return TensorEntry(dtype, shape)


def _file(bytes: Any, sha256: Any) -> FileEntry:
    if not isinstance(sha256, str):
        raise ValueError("a SHA-256 is no text")
    return FileEntry(whole_number(bytes), sha256)


def _to_text(content: Mapping[str, Any]) -> str:
    """Return the canonical text of a manifest, including its digest."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"
