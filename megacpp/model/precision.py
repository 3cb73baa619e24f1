"""Storage and compute dtypes of a run."""

from __future__ import annotations

import torch

from megacpp.config.schema import Config, PrecisionConfig
from megacpp.errors import config_error


def storage_dtype(config: PrecisionConfig) -> torch.dtype:
    """Return the dtype of parameters, gradients and optimizer state: fp64 for proofs, else fp32."""
    return torch.float64 if config.dtype == "fp64" else torch.float32


def compute_dtype(config: PrecisionConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of matrices and activations: `auto` is bf16 if the GPU has it, else fp32."""
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
    """Check that the configuration suits the device.

    Raises:
        ConfigError: a setting would be slow or impossible on this device.
    """
    if device.type != "cpu":
        return
    if config.optim.adamw_state == "cpu_offload":
        raise config_error(
            "optim.adamw_state",
            "cpu_offload",
            "the moments of a run on a CPU are in its memory already",
            "use fp32",
        )
