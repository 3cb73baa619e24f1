"""What speaks against a backend for a configuration on a host; no torch import here.

A refusal returns the reason why its backend can't do its operation, or None: it can. It is asked
with a configuration whose other rules hold.
"""

from __future__ import annotations

import re

from megacpp.config.schema import Config
from megacpp.kernels.host import Host

TRITON = (3, 5)  # the oldest that our Triton kernels are written for
CAPABILITY = (8, 0)  # the oldest GPU


def always(config: Config, host: Host) -> None:
    """Nothing speaks against it: plain torch, on any device, cut in any way."""


def whole_rows(config: Config, host: Host) -> str | None:
    """Definitions that know rows as a whole."""
    if config.mesh.cp > 1:
        return f"needs whole rows on a rank (mesh.cp={config.mesh.cp})"
    return None


def whole_vocabulary(config: Config, host: Host) -> str | None:
    """A definition that makes the logits of all words."""
    if config.mesh.tp > 1:
        return f"needs the whole vocabulary on a rank (mesh.tp={config.mesh.tp})"
    return None


def triton_kernels(config: Config, host: Host) -> str | None:
    """Triton kernels that are compiled where they run, for any GPU with bf16 in its hardware."""
    return old_gpu(host) or old_triton(host)


def experts_triton(config: Config, host: Host) -> str | None:
    """Kernels between the products of the experts, in fp32 inside."""
    return triton_kernels(config, host) or wide_numbers(host)


def wide_numbers(host: Host) -> str | None:
    """Kernels with fp32 inside."""
    return "computes in fp32 (precision.dtype=fp64)" if host.dtype == "fp64" else None


def old_gpu(host: Host) -> str | None:
    """No GPU, or one without bf16."""
    if host.device != "cuda":
        return "needs a GPU"
    if host.capability is not None and host.capability < CAPABILITY:
        there = f"{host.name or 'this GPU'}: {dotted(host.capability)}"
        return f"needs compute capability {dotted(CAPABILITY)} ({there})"
    return None


def old_triton(host: Host) -> str | None:
    """No Triton, or one that our kernels don't know."""
    found = host.packages.get("triton")
    if found is None or version(found) < TRITON:
        return f"needs triton {dotted(TRITON)} (installed: {found or 'none'})"
    return None


def version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: (3, 6) of `3.6.0+git12ab`."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def dotted(numbers: tuple[int, ...]) -> str:
    """`8.0`."""
    return ".".join(map(str, numbers))
