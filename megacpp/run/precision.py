"""Which dtype stores the parameters and which one computes."""

from __future__ import annotations

import torch

from megacpp.config.schema import Config, PrecisionConfig
from megacpp.errors import config_error


def storage_dtype(config: PrecisionConfig) -> torch.dtype:
    """Master parameters, gradients and optimizer state: fp64 for proofs, else fp32."""
    return torch.float64 if config.dtype == "fp64" else torch.float32


def compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype:
    """Matrices and activations: `auto` is bf16 on a GPU that has it, fp32 on a CPU."""
    if config.dtype == "auto":
        able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if able else torch.float32
    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }[config.dtype]


def check_device(config: Config, device: torch.device) -> None:
    """Raises ConfigError for what a run on this device would do slowly, or not at all."""
    if device.type != "cpu":
        return
    if config.optim.adamw_state == "cpu_offload":
        raise config_error(
            "optim.adamw_state",
            "cpu_offload",
            "the moments of a run on a CPU are in its memory already",
            "use fp32",
        )
