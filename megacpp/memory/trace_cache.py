"""Block traces on disk: a block of given sizes is traced once for all runs of a user.

    $MEGACPP_CACHE, else $XDG_CACHE_HOME/megacpp, else ~/.cache/megacpp
        blocks/2-<hash of sources>/<hash of the request>.json

A trace depends on the request and on the code that runs: the sources of blocks, kernels,
parallelism and recompute, and the versions of `PACKAGES`. An edit of any of them starts
another folder; the oldest folders are deleted. No torch import here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megacpp.home import HOME, cache_folder
from megacpp.memory.block_trace import BlockRequest, BlockTrace

FORMAT = 2  # of the files
FOLDERS = 4  # of other sources that stay: branches of a checkout take turns
# Sources that say what a block allocates, below the checkout.
SOURCES = (
    "megacpp/blocks",
    "megacpp/kernels",
    "megacpp/model",
    "megacpp/torch_extras.py",
    "megacpp/memory/block_trace.py",
    "megacpp/cli/block_trace.py",
    "checkpointing",
    "parallel",
)
PACKAGES = ("torch", "triton", "mamba-ssm", "torchao")  # whose own code allocates in a block


@lru_cache(maxsize=1)
def sources_hash(home: Path = HOME) -> str:
    """Return a hash of the code that traces run, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name in SOURCES:
        root = home / name
        for path in [root] if root.suffix else sorted(root.rglob("*.py")):
            found.update(f"{path.relative_to(home)}\n".encode() + path.read_bytes())
    for package in PACKAGES:
        try:
            found.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            found.update(f"{package}\n".encode())
    return found.hexdigest()[:16]


def read(request: BlockRequest) -> BlockTrace | None:
    """Return the stored trace; None: there is no readable one."""
    try:
        return BlockTrace.from_dict(json.loads(_file(request).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(request: BlockRequest, trace: BlockTrace) -> None:
    """Store a trace; errors of writing are ignored, and the block is traced again next time."""
    file = _file(request)
    own = file.with_suffix(f".{os.getpid()}")
    try:
        if not file.parent.exists():
            file.parent.mkdir(parents=True)
            _prune(file.parent)
        own.write_text(json.dumps(trace.as_dict(), separators=(",", ":")))
        own.replace(file)
    except OSError:
        with suppress(OSError):
            own.unlink()


def _file(request: BlockRequest) -> Path:
    name = hashlib.sha256(request.key().encode()).hexdigest()[:32]
    return cache_folder() / "blocks" / f"{FORMAT}-{sources_hash()}" / f"{name}.json"


def _prune(latest: Path) -> None:
    """Delete the oldest folders of other sources."""
    others = [folder for folder in latest.parent.iterdir() if folder != latest]
    others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in others[FOLDERS:]:
        shutil.rmtree(folder, ignore_errors=True)
