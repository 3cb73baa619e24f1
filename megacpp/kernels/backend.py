"""Backends of the hot operations, as the modules of a model have them.

A module that calls a hot operation has a class attribute `kernels: Kernels = PLAIN_KERNELS`, passes
the name on (`backend=self.kernels.m2rnn`), and the builder sets it on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Kernels:
    """Name of the backend of each operation (megacpp/kernels/selection.py)."""

    attention: str = "torch"
    mamba3: str = "torch"
    m2rnn: str = "torch"
    gated_delta_rule: str = "torch"
    short_conv: str = "torch"
    gates: str = "torch"
    experts: str = "torch"
    cross_entropy: str = "torch"
    rms_norm: str = "torch"


# Default of every module: backends that run everywhere.
PLAIN_KERNELS = Kernels()


def set_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Set the backends on every module of a model that has hot operations."""
    for module in model.modules():
        if isinstance(getattr(type(module), "kernels", None), Kernels):
            module.kernels = kernels  # type: ignore[assignment]
