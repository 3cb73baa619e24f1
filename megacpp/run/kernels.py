"""What does the hot operations of a run on its device, and what a header says of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megacpp.config import Config
from megacpp.kernel_choice import Choice, choose
from megacpp.kernel_host import Host, installed
from megacpp.kernels.backend import Kernels
from megacpp.run.precision import compute_dtype

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def host_of(config: Config, device: torch.device) -> Host:
    """What a run of a configuration has under it on a device."""
    dtype = NAMES[compute_dtype(config.precision, device)]
    if device.type != "cuda":
        return Host(device.type, dtype, name=device.type, packages=installed())
    capability = torch.cuda.get_device_capability(device)
    return Host("cuda", dtype, capability, torch.cuda.get_device_name(device), installed())


def choices(config: Config, device: torch.device) -> dict[str, Choice]:
    """What does each operation of a run, and why.

    Raises:
        ConfigError: a backend that is asked for by name can't run here.
    """
    return choose(config, host_of(config, device))


def chosen_kernels(config: Config, device: torch.device) -> Kernels:
    """The names alone."""
    return Kernels(**{name: c.backend for name, c in choices(config, device).items()})


def kernel_lines(found: Mapping[str, Choice]) -> list[str]:
    """One line for each operation of the model: its backend, and why."""
    return [f"{name}: {choice.taken}" for name, choice in found.items()]


def kernel_record(found: Mapping[str, Choice]) -> dict[str, dict[str, object]]:
    """The same for launch.json."""
    return {
        name: {"backend": c.backend, "asked": c.asked, "passed_over": dict(c.passed_over)}
        for name, c in found.items()
    }
