"""Predicted speed of a launch: in the header, in launch.json, and beside the first ten steps.

A GPU is known by its driver's name, or by `python -m bench.gpu --calibrate`, which measures the
machine at hand; a CPU is known by that alone. `--speed.min-mfu` refuses a layout that can't be
fast, or warns of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp.config.schema import Config
from megacpp.errors import config_error
from megacpp.home import cache_folder
from megacpp.speed.against import usual_steps
from megacpp.speed.hardware import GpuSpec, Rates, gpu, known
from megacpp.speed.ours import step_work
from megacpp.speed.pipeline import KNOWN
from megacpp.speed.step import MEASURED, NOT_MODELLED, StepTime, predict

TEN = 10  # steps after which a run is compared
STEADY = 1.2  # times the median: a slowest step above it varies


@dataclass(frozen=True)
class Prediction:
    """Predicted step of a launch.

    Attributes:
        machine: device of each rank.
    """

    machine: GpuSpec
    time: StepTime

    def lines(self) -> list[str]:
        """Return lines of the header."""
        low, high = (1e3 * self.time.step_s * x for x in MEASURED)
        parts = sorted(self.time.parts.items(), key=lambda p: -p[1])[:4]
        return [
            f"predicted: {1e3 * self.time.step_s:,.1f} ms a step ({low:,.1f} to {high:,.1f}), "
            f"{self.time.tokens_per_s:,.0f} tokens/s and device, MFU {self.time.mfu:.1%} on "
            f"{Path(self.machine.name).stem}",
            ", ".join(f"{name} {time / self.time.step_s:.0%}" for name, time in parts),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of launch.json."""
        return {
            "machine": Path(self.machine.name).stem,
            "step_s": self.time.step_s,
            "step_s_range": [self.time.step_s * x for x in MEASURED],
            "tokens_per_s_per_gpu": self.time.tokens_per_s,
            "mfu": self.time.mfu,
            "parts_s": self.time.parts,
            "not_modelled": NOT_MODELLED,
        }


def foresee(config: Config, ranks: int, device: str, name: str) -> Prediction | None:
    """Return the prediction of a launch; None: its machine or its schedule isn't known.

    Args:
        config: as it runs, `auto` resolved.
        ranks: of the launch.
        device: `cuda` or `cpu`.
        name: of the device.
    """
    machine = machine_of(device, name, ranks)
    if machine is None or (config.mesh.pp > 1 and config.mesh.pp_schedule not in KNOWN):
        return None
    per_node = min(ranks, machine.per_node)
    work = step_work(config, ranks, machine.generation, per_node)
    return Prediction(machine, predict(work, machine, Rates()))


def machine_of(device: str, name: str, ranks: int) -> GpuSpec | None:
    """Return the measured machine, or the known GPU of that name; None: neither."""
    own = machine_file(device, ranks)
    if own.is_file():
        return gpu(str(own))
    return known(name) if device == "cuda" else None


def machine_file(device: str, ranks: int) -> Path:
    """Return the file of the machine at hand that `python -m bench.gpu --calibrate` writes.

    Args:
        device: `cuda` or `cpu`, whose processes share what there is: each number has its file.
        ranks: of the launch.
    """
    return cache_folder() / (
        f"machine-cpu-{ranks}.json" if device == "cpu" else "machine-cuda.json"
    )


def check_mfu(config: Config, found: Prediction | None) -> list[str]:
    """Return a warning if the predicted MFU is below `speed.min_mfu`.

    Raises:
        ConfigError: it is, and `speed.gate` refuses.
    """
    least = config.speed.min_mfu
    if not least or config.speed.gate == "off":
        return []
    if found is None:
        return [f"speed.min_mfu={least:g}: this machine isn't known, so nothing is predicted"]
    best = found.time.mfu / MEASURED[0]
    if best >= least:
        return []
    name, time = max(found.time.parts.items(), key=lambda p: _idle(p[0]) * p[1])
    rule = f"predicted MFU is {found.time.mfu:.1%}, at best {best:.1%}"
    if _idle(name):
        rule += f"; {name} takes {time / found.time.step_s:.0%} of a step"
    fix = "let megacpp plan --gpu choose the layout, or write --speed.gate off"
    if config.speed.gate == "refuse":
        raise config_error("speed.min_mfu", least, rule, fix)
    return [f"speed.min_mfu={least:g}: {rule}"]


def _idle(part: str) -> bool:
    """Return whether a part of the step computes nothing."""
    return part.startswith(("exposed", "slowed", "copied", "bubble", "host"))


def verdict(predicted: Mapping[str, Any], steps: Sequence[float]) -> str:
    """Return one line about predicted and measured steps, with the part that is off.

    Args:
        predicted: the entry of launch.json.
        steps: measured seconds of the first steps, in order.
    """
    usual = usual_steps(steps)
    real, ahead = statistics.median(usual), predicted["step_s"]
    words = f"speed: a step takes {1e3 * real:,.1f} ms, predicted {1e3 * ahead:,.1f} ms"
    low, high = predicted["step_s_range"]
    if low <= real <= high:
        return f"{words}: within the range"
    if real > ahead and max(usual) > STEADY * real:
        part = f"steps vary, the slowest takes {1e3 * max(usual):,.1f} ms (rows, ranks, the host)"
    else:
        name, time = max(predicted["parts_s"].items(), key=lambda p: p[1])
        part = (
            f"all steps alike, so a part is off; {name} is the largest ({1e3 * time:,.1f} ms). "
            "--run.profile 12:13, then megacpp speed --against RUN, names it"
        )
    return f"{words}, {real / ahead - 1:+.0%}: {part}"
