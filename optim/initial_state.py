"""State of the optimizer before its first step: dtypes of Muon's, zero moments of AdamW's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from optim.newton_schulz import iteration_dtype

Width = Literal["auto", "bf16", "fp32"]
StateKind = Literal["fp32", "8bit", "4bit", "cpu_offload"]

_WIDTHS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def wire_dtype(parameter: Tensor, width: Width = "auto") -> torch.dtype:
    """Return the dtype of Newton-Schulz and of the exchanged matrices.

    Args:
        parameter: parameter of any shape; `auto` keeps fp64 parameters in fp64.
        width: `auto`, `bf16` or `fp32`.
    """
    return iteration_dtype(parameter) if width == "auto" else _WIDTHS[width]


def momentum_dtype(parameter: Tensor, width: Width = "auto") -> torch.dtype:
    """Return the dtype of the momentum; `auto` is bf16, or fp64 for fp64 parameters.

    bf16 rounds the momentum by less than Newton-Schulz rounds its result.

    Args:
        parameter: parameter of any shape.
        width: `auto`, `bf16` or `fp32`.
    """
    if width == "auto":
        return torch.float64 if parameter.dtype == torch.float64 else torch.bfloat16
    return _WIDTHS[width]


def new_state(parameter: Tensor, kind: StateKind = "fp32") -> dict[str, Tensor]:
    """Return zero moments `exp_avg` and `exp_avg_sq`, of the parameter's shape and sharding.

    `fp32` moments have the parameter's dtype, fp32 or fp64: the kernel takes no mixture of dtypes,
    and in bf16 a second moment would hardly change, because 1 - beta2 of it is a few last places.
    `8bit` and `4bit` moments are torchao's (optim/low_bit.py); `cpu_offload` keeps moments on the
    host (optim/offload.py).

    Args:
        parameter: any shape.
        kind: storage of the moments.

    Raises:
        ConfigError: `optim.adamw_state` isn't available here.
    """
    assert parameter.dtype in (torch.float32, torch.float64), (
        f"AdamW keeps fp32 or fp64 weights, not {parameter.dtype}"
    )
    with torch.no_grad():
        if kind == "8bit" or kind == "4bit":
            from optim.low_bit import new_low_bit_state

            return new_low_bit_state(parameter, kind)
        if kind == "cpu_offload":
            from optim.offload import new_offloaded_state

            return new_offloaded_state(parameter)
        assert kind == "fp32", kind
        return {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
