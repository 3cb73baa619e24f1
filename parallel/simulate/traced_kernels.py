"""Backends whose allocations a trace has; no torch import."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict

from megacpp.config.schema import Config
from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.selection import OPERATIONS


def traced_kernels(config: Config) -> Kernels:
    """Return the backends that a trace counts: on a GPU those named, where it can; else torch's."""
    if config.train.device != "cuda":
        return PLAIN_KERNELS
    triton = importlib.util.find_spec("triton") is not None
    counted = {}
    for name, operation in OPERATIONS.items():
        one = next((b for b in operation.backends if b.name == getattr(config.kernels, name)), None)
        if one and one.traced and (triton or one.name != "triton"):
            counted[name] = one.name
    return Kernels(**counted)


def traced_words(config: Config) -> str:
    """Return the traced backends as text, with the backend of a launch where it differs."""
    found = []
    for operation, backend in asdict(traced_kernels(config)).items():
        taken = getattr(config.kernels, operation)
        if taken != "auto":  # the model has it
            found.append(f"{operation} {backend}")
            found[-1] += f" (not {taken})" if taken != backend else ""
    return ", ".join(found) or "torch"


def untraced_words(config: Config) -> str:
    """Return a note on kernels of a launch that can't be traced here; empty: all are."""
    words = traced_words(config)
    if "(not " not in words:
        return ""
    lacking = importlib.util.find_spec("triton") is None
    return f"counted with kernels: {words}" + ("; triton isn't installed here" if lacking else "")
