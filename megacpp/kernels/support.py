"""Reasons why a configuration can't use a backend on a host; no torch import here.

Each function returns why its backend can't do its operation, or None: it can. It is called with a
configuration whose other rules hold.
"""

from __future__ import annotations

import re

from megacpp.config.schema import Config
from megacpp.kernels.host import Host

TRITON = (3, 5)  # the oldest that our Triton kernels are written for
CAPABILITY = (8, 0)  # the oldest GPU


def always(config: Config, host: Host) -> None:
    """Return None: plain torch runs on any device and mesh."""


def whole_rows(config: Config, host: Host) -> str | None:
    """Return why a definition that needs whole rows can't run; None: it can."""
    if config.mesh.cp > 1:
        return f"needs whole rows on a rank (mesh.cp={config.mesh.cp})"
    return None


def whole_vocabulary(config: Config, host: Host) -> str | None:
    """Return why a definition that makes the logits of all words can't run; None: it can."""
    if config.mesh.tp > 1:
        return f"needs the whole vocabulary on a rank (mesh.tp={config.mesh.tp})"
    return None


def triton_kernels(config: Config, host: Host) -> str | None:
    """Return why Triton kernels, compiled for any GPU with bf16, can't run; None: they can."""
    return old_gpu(host) or old_triton(host)


def triton_in_fp32(config: Config, host: Host) -> str | None:
    """Return why Triton kernels with fp32 inside can't run; None: they can."""
    return triton_kernels(config, host) or wide_numbers(host)


def wide_numbers(host: Host) -> str | None:
    """Return why kernels with fp32 inside can't run; None: they can."""
    return "computes in fp32 (precision.dtype=fp64)" if host.dtype == "fp64" else None


def old_gpu(host: Host) -> str | None:
    """Return that a host has no GPU, or one without bf16; None: it has one."""
    if host.device != "cuda":
        return "needs a GPU"
    if host.capability is not None and host.capability < CAPABILITY:
        there = f"{host.name or 'this GPU'}: {dotted(host.capability)}"
        return f"needs compute capability {dotted(CAPABILITY)} ({there})"
    return None


def old_triton(host: Host) -> str | None:
    """Return that a host has no Triton, one that is too old or can't start; None: it has one."""
    found = host.packages.get("triton")
    if found is None or version(found) < TRITON:
        return f"needs triton {dotted(TRITON)} (installed: {found or 'none'})"
    return no_start(host)


def no_start(host: Host) -> str | None:
    """Return that Triton can't start on a host; None: it can, or nothing has tried."""
    return f"triton can't start: {host.trouble}" if host.trouble else None


def version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (3, 6) of `3.6.0+git12ab`."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def dotted(numbers: tuple[int, ...]) -> str:
    """Return numbers as text such as `8.0`."""
    return ".".join(map(str, numbers))
