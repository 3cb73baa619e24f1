"""Timetables of pipeline schedules, from the orders that torch's schedules plan."""

from __future__ import annotations

from bench.pictures.svg import Drawing
from megacpp.model.stage_actions import StageAction, from_torch
from megacpp.model.stages import stages_per_rank
from megacpp.speed.pipeline import StageTime, schedule, spans_of
from parallel.simulate.schedule import torch_order

RANKS, MICROBATCHES, UNIT, ROW = 4, 8, 10, 19
SHOWN = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev")


def timetable(name: str) -> list[list[tuple[StageAction, float, float]]]:
    """Return action, start and time of each rank; its stages' forwards take 2, backwards 4."""
    cut = stages_per_rank(name)
    if cut == 1:
        actions = schedule(name, RANKS, MICROBATCHES)
    else:
        actions = from_torch(torch_order(name, RANKS, MICROBATCHES))
    return spans_of(actions, [StageTime(2 / cut, 4 / cut, 2 / cut)] * (RANKS * cut), send=0.0)


def pipeline_timetables() -> Drawing:
    """Draw who works when, under six schedules."""
    left, wide = 74, 66
    drawing = Drawing(
        left + wide * UNIT + 14, "Timetables of six pipeline schedules, 8 microbatches on 4 ranks"
    )
    fills = {"F": 0, "B": 1, "I": 1, "W": 2}
    drawing.legend(left, 12, [(0, "forward"), (1, "backward"), (2, "its weights' part, later"),
                              ("off", "idle")])  # fmt: skip
    y = 44.0
    for name in SHOWN:
        table = timetable(name)
        end = max(begin + length for spans in table for _, begin, length in spans)
        busy = sum(length for spans in table for *_, length in spans)
        drawing.text(left, y + 2, name, "head")
        drawing.text(left + 130, y + 2, f"idle {1 - busy / end / RANKS:.0%}", "note")
        for rank, spans in enumerate(table):
            top = y + 9 + rank * ROW
            drawing.text(14, top + 13, f"rank {rank}", "note")
            drawing.rect(left, top, end * UNIT, ROW - 2, "off")
            for (_, kind, i), begin, length in spans:
                x, width = left + begin * UNIT, length * UNIT
                drawing.rect(x, top, width - 1, ROW - 2, fills[kind], str(i))
        y += 9 + RANKS * ROW + 22
    return drawing
