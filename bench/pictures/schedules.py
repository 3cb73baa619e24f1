"""Timetables of pipeline schedules, from the orders that torch's schedules plan."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from bench.pictures.svg import Drawing
from megacpp.model.stages import num_stages, stage_ids

Step = tuple[str, int, int]  # F, B, I or W; stage; microbatch
RANKS, MICROBATCHES, UNIT, ROW = 4, 8, 10, 19
SHOWN = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")


def planned(schedule: str) -> list[list[Step]]:
    """Return the steps of each rank, of a schedule with two stages a rank."""
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import parallel.pipeline

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        cpu, count = torch.device("cpu"), num_stages(schedule, RANKS)
        ids = stage_ids(schedule, RANKS, 0)
        stages = [PipelineStage(torch.nn.Identity(), i, count, cpu) for i in ids]
        make: Any = parallel.pipeline.SCHEDULES[schedule]
        orders = make(stages, MICROBATCHES).pipeline_order
    finally:
        dist.destroy_process_group()
    found = []
    for rank in range(RANKS):
        steps = re.findall(r"(\d+)([FBIW])(\d+)", str(orders[rank]))
        found.append([(letter, int(stage), int(i)) for stage, letter, i in steps])
    return found


def plain(schedule: str, rank: int) -> list[Step]:
    """Return the steps of a rank, of a schedule with one stage a rank."""
    m = MICROBATCHES
    ahead = m if schedule == "gpipe" else min(m, RANKS - rank)
    steps = [("F", rank, i) for i in range(ahead)]
    for i in range(m):
        steps += [("B", rank, i)] + [("F", rank, i + ahead)] * (i + ahead < m)
    return steps


def timed(orders: list[list[Step]], cost: dict[str, float]) -> list[list[tuple[float, Step]]]:
    """Return when each step of each rank begins, each as early as it can."""
    last = max(stage for steps in orders for _, stage, _ in steps)
    ends: dict[Step, float] = {}
    free, left = [0.0] * len(orders), [list(steps) for steps in orders]
    found: list[list[tuple[float, Step]]] = [[] for _ in orders]
    while any(left):
        before = len(ends)
        for rank, steps in enumerate(left):
            while steps:
                letter, stage, i = steps[0]
                if letter == "F":
                    source = ("F", stage - 1, i) if stage else None
                elif letter == "W":
                    source = ("B", stage, i)
                else:
                    source = ("B", stage + 1, i) if stage < last else ("F", stage, i)
                if source and source not in ends:
                    break
                begin = max(free[rank], ends[source] if source else 0.0)
                found[rank].append((begin, steps.pop(0)))
                free[rank] = begin + cost[letter]
                ends["B" if letter == "I" else letter, stage, i] = free[rank]
        assert len(ends) > before, "the ranks wait for each other"
    return found


def pipeline_timetables() -> Drawing:
    """Draw who works when, under six schedules."""
    tables = {}
    for name in SHOWN:
        cut = num_stages(name, RANKS) // RANKS
        orders = [plain(name, r) for r in range(RANKS)] if cut == 1 else planned(name)
        cost = {"F": 2 / cut, "B": 4 / cut, "I": 2 / cut, "W": 2 / cut}
        tables[name] = timed(orders, cost), cost
    left, wide = 74, 66
    drawing = Drawing(
        left + wide * UNIT + 14, "Timetables of six pipeline schedules, 8 microbatches on 4 ranks"
    )
    fills = {"F": 0, "B": 1, "I": 1, "W": 2}
    drawing.legend(left, 12, [(0, "forward"), (1, "backward"), (2, "its weights' part, later"),
                              ("off", "idle")])  # fmt: skip
    y = 44.0
    for name, (table, cost) in tables.items():
        end = max(begin + cost[step[0]] for steps in table for begin, step in steps)
        busy = sum(cost[step[0]] for steps in table for _, step in steps)
        drawing.text(left, y + 2, name, "head")
        drawing.text(left + 130, y + 2, f"idle {1 - busy / end / RANKS:.0%}", "note")
        for rank, steps in enumerate(table):
            top = y + 9 + rank * ROW
            drawing.text(14, top + 13, f"rank {rank}", "note")
            drawing.rect(left, top, end * UNIT, ROW - 2, "off")
            for begin, (letter, _, i) in steps:
                width = cost[letter] * UNIT
                drawing.rect(left + begin * UNIT, top, width - 1, ROW - 2, fills[letter], str(i))
        y += 9 + RANKS * ROW + 22
    return drawing
