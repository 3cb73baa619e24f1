"""Layout of a launch record, by number; no torch import here.

1   as written before there was a number: versions of a few packages, those that are installed
2   `schema`; `versions` names every package of `PACKAGES` and the libraries of `MACHINE`, null
    where there is none
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

SCHEMA = 2
PACKAGES = (
    *("megacpp", "torch", "numpy", "safetensors", "tokenizers", "tensorboard", "rich"),
    *("triton", "torchao", "tilelang", "mamba-ssm", "flash-linear-attention"),
    "transformer-engine",
)
MACHINE = ("cuda", "cuda driver", "nccl")


def installed(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def current(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch record in today's layout; what an older one didn't record is null.

    Raises:
        ValueError: a record of a later layout.
    """
    schema = record.get("schema", 1)
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ValueError(f"schema is {schema!r}, and this version reads 1 to {SCHEMA}")
    known = dict.fromkeys((*PACKAGES, *MACHINE))
    return {**record, "schema": SCHEMA, "versions": known | (record.get("versions") or {})}
