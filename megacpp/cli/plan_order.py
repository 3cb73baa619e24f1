"""Order of a plan's candidates: by predicted speed if a GPU is named, and the reasons for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megacpp.cli.speed import predicted, work_of
from megacpp.config.schema import Config, MeshConfig
from megacpp.memory.fastest import fastest
from megacpp.memory.planner import CRITERIA, Candidate, Plan, deciding
from megacpp.speed.hardware import GpuSpec, Rates
from megacpp.speed.ours import step_work
from megacpp.speed.step import StepTime, least_seconds, predict
from megacpp.terminal.screen import wrapped

Again = Callable[[Config, str, float], float]  # seconds with a figure of the GPU multiplied
AXES = ("tp", "ep", "cp", "pp", "dp_replicate", "dp_shard")
SPEEDS = {
    "network_gbs": "the network",
    "nvlink_gbs": "NVLink",
    "hbm_gbs": "the memory",
    "products": "products",  # measured ones and attention too
}


@dataclass(frozen=True)
class Asked:
    """Input of a plan.

    Attributes:
        base: the preset.
        config: the preset with the changes of the command line.
        given: dotted settings of the command line, which a plan leaves unchanged.
        world: number of devices.
        memory: bytes of a device.
        tokens: tokens per step.
        per_node: devices per machine.
    """

    base: Config
    config: Config
    given: dict[str, Any]
    world: int
    memory: int
    tokens: int
    per_node: int = 8

    @property
    def budget(self) -> int:
        """Bytes of a device that the estimate may use."""
        return int(self.memory * (1 - self.config.memory.headroom))


def mesh_words(mesh: MeshConfig) -> str:
    """Return degrees above 1, such as `tp2 ep4 dp4`."""
    short = {"dp_replicate": "rep", "dp_shard": "dp"}
    axes = [(short.get(axis, axis), getattr(mesh, axis)) for axis in AXES]
    return " ".join(f"{name}{n}" for name, n in axes if n > 1) or "one rank"


def by_speed(
    asked: Asked, machine: GpuSpec, few: int, watch: Callable[..., Any] = iter
) -> tuple[Plan, list[StepTime]]:
    """Return the fastest configurations that fit, and the predicted step of each.

    Memory still decides what is a candidate; one at risk stays behind those that fit.

    Args:
        asked: the run and its cluster.
        machine: GPU of each rank.
        few: number of configurations.
        watch: wraps the meshes while they are searched.
    """
    world, per_node = asked.world, asked.per_node

    def least(config: Config) -> float:
        work = step_work(config, world, machine.generation, per_node, least=True)
        return least_seconds(work, machine, Rates())

    def seconds(config: Config) -> float:
        return predicted(config, world, machine, per_node).step_s

    found = fastest(
        *(asked.config, world, asked.budget, asked.tokens, least, seconds, few),
        fixed=tuple(asked.given),
        watch=watch,
    )
    return found, [predicted(one.config, world, machine, per_node) for one in found.candidates]


def at_other_speeds(asked: Asked, machine: GpuSpec) -> Again:
    """Return the prediction that `reasons` asks for."""

    def again(config: Config, figure: str, times: float) -> float:
        other, rates = machine, Rates()
        if figure == "products":
            rates = Rates(products=times, attention=times)
        else:
            other = replace(machine, **{figure: times * getattr(machine, figure)})
        return predict(work_of(config, asked.world, other, asked.per_node), other, rates).step_s

    return again


def reasons(
    shown: Sequence[Candidate], times: Sequence[StepTime], again: Again | None = None
) -> list[str]:
    """Return why each candidate comes before the next.

    Args:
        shown: candidates, best first.
        times: their predicted steps; empty without a GPU.
        again: predicts a step with one speed of the GPU multiplied, for what would change the
            order of the first two.
    """
    lines = [""]
    for number, (one, other) in enumerate(pairwise(shown), 1):
        before = f"#{number} before #{number + 1}"
        if times and one.score.misfit == other.score.misfit:
            lines += wrapped(f"{before}: {_differences(*times[number - 1 : number + 1])}")
            if number == 1 and again:
                lines += wrapped(f"  {_reversed_by(one, other, again)}")
            continue
        name = deciding(one.score, other.score)
        a, b = (_value(candidate, name) for candidate in (one, other))
        lines += wrapped(f"{before}: {CRITERIA[name]} ({a}, not {b})")
    return lines


def _reversed_by(one: Candidate, other: Candidate, again: Again) -> str:
    """Return which speeds of the GPU, halved or doubled, would put `other` first."""
    found = [
        f"{word} the speed of {name}"
        for figure, name in SPEEDS.items()
        for times, word in ((0.5, "half"), (2.0, "twice"))
        if again(other.config, figure, times) < again(one.config, figure, times)
    ]
    if not found:
        return f"half or twice the speed of {', '.join(SPEEDS.values())} keeps that order"
    return f"the order changes with {' or '.join(found)}"


def _differences(one: StepTime, other: StepTime) -> str:
    """Return the three parts that differ most, in ms of a step."""
    names = dict.fromkeys((*one.parts, *other.parts))
    off = {n: 1e3 * (one.parts.get(n, 0.0) - other.parts.get(n, 0.0)) for n in names}
    most = sorted(off, key=lambda name: -abs(off[name]))[:3]
    words = ", ".join(f"{name} {off[name]:+,.1f} ms" for name in most if round(off[name], 1))
    return f"{1e3 * (other.step_s - one.step_s):,.1f} ms shorter ({words or 'nothing differs'})"


def _value(candidate: Candidate, name: str) -> str:
    """Return a criterion's value as text."""
    config, value = candidate.config, getattr(candidate.score, name)
    return {
        "misfit": candidate.estimate.verdict.replace("_", " "),
        "fewer_rows": f"{config.train.device_batch_size} rows",
        "checkpointing": candidate.policy.name,
        "less_headroom": f"{-value} %",
        "policy": candidate.policy.name,
    }.get(name, str(value))
