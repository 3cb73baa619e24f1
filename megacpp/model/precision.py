"""Storage and compute dtypes of a run."""

from __future__ import annotations

import torch

from megacpp.config.schema import Config, PrecisionConfig
from megacpp.errors import config_error

FP8_CAPABILITY = (8, 9)  # Ada and Hopper have FP8 matrix products, no GPU before them
GROUPED_CAPABILITY = (9, 0)  # required by torch._scaled_grouped_mm with a scale per row


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
    check_fp8_device(config, device)
    if device.type != "cpu":
        return
    if config.optim.adamw_state == "cpu_offload":
        raise config_error(
            "optim.adamw_state",
            "cpu_offload",
            "the moments of a run on a CPU are in its memory already",
            "use fp32",
        )


def check_fp8_device(config: Config, device: torch.device) -> None:
    """Check that the device has the requested FP8.

    Raises:
        ConfigError: it doesn't.
    """
    fp8 = config.precision.fp8
    if fp8 == "off":
        return
    if device.type != "cuda":
        if fp8 == "te":
            raise config_error(
                "precision.fp8", fp8, "runs on a GPU alone", "use precision.fp8=torchao, or off"
            )
        return
    if fp8 == "te":
        _check_version()
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise config_error(
            "precision.fp8",
            fp8,
            f"needs a GPU of compute capability 8.9 or more (this one: {capability[0]}."
            f"{capability[1]})",
            "use precision.fp8=off",
        )
    if fp8 == "torchao" and "E" in config.precision.fp8_layers and capability < GROUPED_CAPABILITY:
        raise config_error(
            "precision.fp8_layers",
            config.precision.fp8_layers,
            "experts in FP8 need a GPU of compute capability 9.0 or more (this one: "
            f"{capability[0]}.{capability[1]})",
            "use precision.fp8_layers=AF",
        )


def _check_version() -> None:
    """Raise ConfigError for a Transformer Engine older than `autocast` and current scaling."""
    from transformer_engine import pytorch  # pyright: ignore[reportMissingImports]
    from transformer_engine.common import recipe  # pyright: ignore[reportMissingImports]

    if not hasattr(pytorch, "autocast") or not hasattr(recipe, "Float8CurrentScaling"):
        raise config_error(
            "precision.fp8",
            "te",
            "needs a Transformer Engine that has `autocast` and `Float8CurrentScaling`",
            "pip install -U 'transformer-engine[pytorch]', or use precision.fp8=torchao",
        )
