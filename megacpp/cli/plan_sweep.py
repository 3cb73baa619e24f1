"""Option `megacpp plan --sweep`: the fastest configuration of each cluster size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megacpp.cli.plan_order import Asked, by_speed, mesh_words
from megacpp.config.environment import MOST_RANKS
from megacpp.config.schema import MeshConfig
from megacpp.errors import config_error
from megacpp.memory.planner import Candidate
from megacpp.speed.cost import Cost, amount
from megacpp.speed.hardware import GpuSpec
from megacpp.speed.step import NOT_MODELLED, StepTime
from megacpp.terminal.progress import counted
from megacpp.terminal.screen import table, wrapped

BAR = 24  # letters of the longest bar


def worlds(text: str) -> list[int]:
    """Return the cluster sizes of `gpus=8..1024`: the first one, doubled up to the last.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"gpus=(\d+)\.\.(\d+)", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high <= MOST_RANKS:
        rule = f"must be gpus=FIRST..LAST, of 1 to {MOST_RANKS} GPUs"
        raise config_error("sweep", text, rule, "write --sweep gpus=8..1024")
    found = [low]
    while found[-1] * 2 <= high:
        found.append(found[-1] * 2)
    return found


def sweep(asked: Asked, machine: GpuSpec, text: str, cost: Cost, as_json: bool) -> int:
    """Print the fastest configuration of each cluster size.

    Args:
        asked: the run; its world is replaced.
        machine: GPU of each rank.
        text: the sizes, as `worlds` reads them.
        cost: what was asked for.
        as_json: print one JSON list.
    """
    found: list[tuple[int, Candidate | None, StepTime | None]] = []
    for world in worlds(text):
        plan, times = by_speed(replace(asked, world=world), machine, 1, _watched(world))
        best = (plan.candidates[0], times[0]) if times else (None, None)
        found.append((world, best[0], best[1]))
    if as_json:
        print(json.dumps([_row(*one, replace(cost, world=one[0])) for one in found], indent=2))
        return 0
    print("\n".join(_lines(asked, machine, found, cost)))
    return 0


def _watched(world: int) -> Callable[[Sequence[MeshConfig]], Iterable[MeshConfig]]:
    """Return a function that shows progress over meshes of a cluster."""
    return lambda meshes: counted(meshes, f"plan of {world:,} GPUs", len(meshes))


def _row(world: int, one: Candidate | None, time: StepTime | None, cost: Cost) -> dict[str, Any]:
    if one is None or time is None:
        return {"world": world, "knobs": None}
    return {
        "world": world,
        "knobs": one.knobs(),
        "step_s": time.step_s,
        "tokens_per_s": time.tokens_per_s * world,
        "mfu": time.mfu,
        **cost.as_dict(time),
    }


def _lines(
    asked: Asked,
    machine: GpuSpec,
    found: list[tuple[int, Candidate | None, StepTime | None]],
    cost: Cost,
) -> list[str]:
    heading = ["GPUs", "tokens/s", "", "MFU", "mesh", "rows", "acc"]
    heading += ["hours"] * bool(cost.tokens) + ["cost"] * bool(cost.price)
    most = max((time.tokens_per_s * world for world, _, time in found if time), default=1.0)
    rows = [heading]
    for world, one, time in found:
        if one is None or time is None:
            rows.append([f"{world:,}", "nothing fits or is legal", *[""] * (len(heading) - 2)])
            continue
        speed, here = time.tokens_per_s * world, replace(cost, world=world)
        row = [f"{world:,}", f"{speed:,.0f}", "#" * max(1, round(BAR * speed / most))]
        train = one.config.train
        row += [f"{time.mfu:.0%}", mesh_words(one.config.mesh)]
        row += [str(train.device_batch_size), str(train.grad_accum)]
        row += [f"{here.hours(time):,.1f}"] * bool(cost.tokens)
        row += [amount(here.money(time))] * bool(cost.price)
        rows.append(row)
    what = "" if cost.tokens or not cost.price else "; cost is that of 1,000,000,000 tokens"
    return [
        *wrapped(f"{asked.config.preset}, {asked.tokens:,} tokens a step, the fastest that fits on "
                 f"{machine.name}, predicted{what}:"),
        "",
        *table(rows),
        "",
        *wrapped(f"not modelled: {NOT_MODELLED}"),
    ]  # fmt: skip
