"""Backends of a run's operations on its device, and their header lines."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch

from megacpp.config.schema import Config
from megacpp.errors import config_error
from megacpp.kernels.backend import Kernels
from megacpp.kernels.host import Host, installed
from megacpp.kernels.selection import BackendSelection, choose, plain_loss
from megacpp.model.precision import compute_dtype

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def host_of(config: Config, device: torch.device) -> Host:
    """Return the properties of a device that backends depend on, with the run's dtype."""
    dtype = NAMES[compute_dtype(config.precision, device)]
    if device.type != "cuda":
        return Host(device.type, dtype, name=device.type, packages=installed())
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    return Host("cuda", dtype, capability, name, installed(), triton_trouble())


@cache
def triton_trouble() -> str:
    """Return why Triton can't start on this machine's GPU; empty: it can, or it isn't installed.

    What launches its kernels is C, which it compiles here against Python's headers, once.
    """
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except ModuleNotFoundError:
        return ""
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]} can't compile what launches its kernels (no headers of Python?)"
    except Exception as error:  # of each of its versions
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def check_compiler(config: Config, device: torch.device) -> None:
    """Check that kernels of compiled blocks can be launched.

    Raises:
        ConfigError: on a GPU they are Triton's, which can't start.
    """
    trouble = triton_trouble() if device.type == "cuda" else ""
    if trouble and config.train.compile == "inductor":
        fix = "install a C compiler and Python's headers, or use --train.compile off"
        raise config_error("train.compile", "inductor", f"triton can't start: {trouble}", fix)


def choices(config: Config, device: torch.device) -> dict[str, BackendSelection]:
    """Return the backend of each operation, with the reason; called once, at the start of a run.

    It warns if a GPU has no kernel for the head.

    Raises:
        ConfigError: a backend that is requested by name can't run here.
    """
    host = host_of(config, device)
    found = choose(config, host)
    if warning := plain_loss(found, host):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return found


def chosen_kernels(config: Config, device: torch.device) -> Kernels:
    """Return the names of the backends."""
    found = choose(config, host_of(config, device))
    return Kernels(**{name: c.backend for name, c in found.items()})


def as_chosen(config: Config, device: torch.device) -> Config:
    """Return the configuration with `auto` kernels resolved, if this host has the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return config
    names = {name: choice.backend for name, choice in choices(config, device).items()}
    return replace(config, kernels=replace(config.kernels, **names))


def kernel_lines(found: Mapping[str, BackendSelection]) -> list[str]:
    """Return a line for each operation of the model: its backend, and the reason."""
    return [f"{name}: {choice.taken}" for name, choice in found.items()]


def kernel_record(found: Mapping[str, BackendSelection]) -> dict[str, dict[str, object]]:
    """Return the backends for launch.json."""
    return {
        name: {"backend": c.backend, "asked": c.asked, "passed_over": dict(c.passed_over)}
        for name, c in found.items()
    }
