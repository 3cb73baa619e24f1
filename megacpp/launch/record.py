"""Launch record: the header on the screen, config.json and launch.json in the run folder."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megacpp.config.schema import Config
from megacpp.config.settings import as_json
from megacpp.launch.schema import PACKAGES, SCHEMA, installed
from megacpp.memory.calibration import fingerprint
from megacpp.model.count import ParameterCount
from megacpp.state.files import write_json
from megacpp.terminal.screen import columns, wrapped

CORE = ("megacpp", "torch", "numpy", "safetensors", "tokenizers", "tensorboard", "rich")


def write_config(folder: Path, config: Config, provenance: dict[str, str]) -> None:
    """Write config.json: the resolved configuration and the origin of each value."""
    content = {"config": as_json(config), "provenance": provenance}
    write_json(folder / "config.json", content)


def write_launch(
    folder: Path, config: Config, mesh: dict[str, int], count: ParameterCount, **more: Any
) -> None:
    """Write launch.json: configuration and hash, commit, versions, device, mesh, parameter counts.

    `megacpp.report.files.read_launch` reads it, and those of earlier versions. A resumed run writes
    `launch-<step>.json` beside it.

    Args:
        folder: folder of the run.
        config: configuration of the run.
        mesh: degree of each axis.
        count: parameter counts.
        more: further entries.
    """
    content = {
        "schema": SCHEMA,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "versions": all_versions(),
        "platform": platform.platform(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "mesh": mesh,
        "parameters": dataclasses.asdict(count),
        "policy": dataclasses.asdict(config.recompute),
        "config": as_json(config),
        "config_hash": fingerprint(as_json(config)),
        **more,
    }
    first = more.get("first_step", 0)
    write_json(folder / (f"launch-{first:06d}.json" if first else "launch.json"), content)


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as `NVIDIA H200` or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def driver_version() -> str | None:
    """Return the NVIDIA driver's version from nvidia-smi, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line.strip() for line in done.stdout.splitlines() if line.strip()), None)


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that every run depends on."""
    found = {name: installed(name) for name in CORE}
    return {name: version for name, version in found.items() if version is not None}


def all_versions() -> dict[str, str | None]:
    """Return versions of optional packages, CUDA, its driver and NCCL too; None: not there."""
    gpu = torch.cuda.is_available()
    return {
        **{name: installed(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cuda driver": driver_version() if gpu else None,
        "nccl": nccl_version() if gpu else None,
    }


def nccl_version() -> str | None:
    """Return the version of NCCL in this torch, or None."""
    import torch.distributed as dist
    from torch.cuda import nccl

    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, nccl.version()))


def git_commit() -> str | None:
    """Return the commit of the checkout, with `-dirty` if it has changes; None outside git."""
    root = Path(__file__).parents[2]
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("-dirty" if _git(root, "status", "--porcelain") else "")


def print_header(sections: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print the header of a run: named groups of lines, wrapped to the screen."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for title, lines in sections:
        console.print(f"[bold]{title}[/bold]")
        for text in lines:
            # Wrapping would break the aligned columns of a table, which fits anyway.
            fits = len(text) + 2 <= columns()
            for line in [f"  {text}"] if fits else wrapped(text, "    ", "  "):
                console.print(line, markup=False)


def _git(root: Path, *arguments: str) -> str | None:
    # Without a lock of the index, which a killed run would leave behind.
    words = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            words, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
