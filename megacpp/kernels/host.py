"""Host of a run: device, dtype, packages; no torch import here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata

# Optional packages that backends are written with, by the name that they are installed under.
PACKAGES = (
    *("torch", "triton", "tilelang", "mamba-ssm", "flash-linear-attention", "einops", "torchao"),
    "transformer-engine",
)


@dataclass(frozen=True)
class Host:
    """Device, dtype and packages of a run.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: activations and matrices: `bf16`, `fp16`, `fp32`, `fp64`.
        capability: compute capability of the GPU; None: not known yet, nothing is refused by it.
        name: of the device, for messages.
        packages: versions of installed packages.
        trouble: why Triton can't start there; empty: it can, or nothing has tried.
    """

    device: str
    dtype: str
    capability: tuple[int, int] | None = None
    name: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    trouble: str = ""


def installed() -> dict[str, str]:
    """Versions of the installed packages among `PACKAGES`."""
    return dict(_installed())


@lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
