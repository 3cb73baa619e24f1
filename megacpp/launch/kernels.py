"""What does the hot operations of a run on its device, and what a header says of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from megacpp.config.schema import Config
from megacpp.kernels.backend import Kernels
from megacpp.kernels.host import Host, installed
from megacpp.kernels.selection import BackendSelection, choose, plain_loss
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


def choices(config: Config, device: torch.device) -> dict[str, BackendSelection]:
    """What does each operation of a run, and why; asked once, where a run starts.

    Warns of a GPU for whose head there is no kernel.

    Raises:
        ConfigError: a backend that is asked for by name can't run here.
    """
    host = host_of(config, device)
    found = choose(config, host)
    if warning := plain_loss(found, host):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return found


def chosen_kernels(config: Config, device: torch.device) -> Kernels:
    """The names alone."""
    found = choose(config, host_of(config, device))
    return Kernels(**{name: c.backend for name, c in found.items()})


def as_chosen(config: Config, device: torch.device) -> Config:
    """The configuration with the kernels of this host by name, where it has the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return config
    names = {name: choice.backend for name, choice in choices(config, device).items()}
    return replace(config, kernels=replace(config.kernels, **names))


def kernel_lines(found: Mapping[str, BackendSelection]) -> list[str]:
    """One line for each operation of the model: its backend, and why."""
    return [f"{name}: {choice.taken}" for name, choice in found.items()]


def kernel_record(found: Mapping[str, BackendSelection]) -> dict[str, dict[str, object]]:
    """The same for launch.json."""
    return {
        name: {"backend": c.backend, "asked": c.asked, "passed_over": dict(c.passed_over)}
        for name, c in found.items()
    }
