"""Order of a plan's candidates: by predicted speed if a GPU is named, and the reasons for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megacpp.cli.speed import predicted
from megacpp.memory.planner import CRITERIA, Candidate, Plan, deciding
from megacpp.speed.hardware import GpuSpec
from megacpp.speed.step import StepTime
from megacpp.terminal.screen import wrapped


def by_speed(
    found: Plan, world: int, machine: GpuSpec, per_node: int
) -> tuple[Plan, list[StepTime]]:
    """Return the plan with the fastest candidate first, and the predicted step of each.

    Memory still decides what is a candidate; one at risk stays behind those that fit.

    Args:
        found: by the rules of megacpp/memory/planner.py.
        world: number of GPUs.
        machine: GPU of each.
        per_node: GPUs of a node.
    """
    times = [predicted(one.config, world, machine, per_node) for one in found.candidates]
    order = sorted(
        range(len(times)), key=lambda n: (found.candidates[n].score.misfit, -times[n].tokens_per_s)
    )
    ranked = replace(found, candidates=tuple(found.candidates[n] for n in order))
    return ranked, [times[n] for n in order]


def reasons(shown: Sequence[Candidate], times: Sequence[StepTime]) -> list[str]:
    """Return why each candidate comes before the next; `times` is empty without a GPU."""
    lines = [""]
    for number, (one, other) in enumerate(pairwise(shown), 1):
        before = f"#{number} before #{number + 1}"
        if times and one.score.misfit == other.score.misfit:
            lines += wrapped(f"{before}: {_differences(*times[number - 1 : number + 1])}")
            continue
        name = deciding(one.score, other.score)
        a, b = (_value(candidate, name) for candidate in (one, other))
        lines += wrapped(f"{before}: {CRITERIA[name]} ({a}, not {b})")
    return lines


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
