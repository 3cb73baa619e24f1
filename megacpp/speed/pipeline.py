"""Seconds of a pipeline: actions of each rank by schedule, and their simulation.

    actions = schedule("1f1b", ranks=4, microbatches=16)
    simulate(actions, [StageTime(1.0, 2.0)] * 4, send=0.0)  # (16 + 4 - 1) x 3

Schedules that `schedule` doesn't know come from torch (`from_torch` of model/stage_actions.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megacpp.model.stage_actions import Actions, StageAction

INTERLEAVED = "interleaved"
KNOWN = ("gpipe", "1f1b", INTERLEAVED)  # schedules that `schedule` knows


class StageTime(NamedTuple):
    """Seconds of one microbatch in one stage; `weights` is the part of `backward` for weights."""

    forward: float
    backward: float
    weights: float = 0.0


@lru_cache(maxsize=256)
def schedule(name: str, ranks: int, microbatches: int, per_rank: int = 1) -> Actions:
    """Return the actions of each rank.

    Args:
        name: `gpipe`, `1f1b` or `interleaved`.
        ranks: of the pipeline.
        microbatches: of a step.
        per_rank: stages of a rank, for `interleaved`.

    Raises:
        ValueError: another schedule, or microbatches that rounds of `interleaved` don't divide.
    """
    if name == INTERLEAVED and microbatches % max(1, microbatches // ranks):
        raise ValueError(f"microbatches={microbatches}: no multiple of its rounds")
    if name == "gpipe":
        return tuple(
            tuple(StageAction(r, kind, m) for kind in "FB" for m in range(microbatches))
            for r in range(ranks)
        )
    if name == "1f1b" or (name == INTERLEAVED and per_rank == 1):
        return tuple(_one_f_one_b(rank, ranks, microbatches) for rank in range(ranks))
    if name == INTERLEAVED:
        return tuple(_interleaved(rank, ranks, microbatches, per_rank) for rank in range(ranks))
    raise ValueError(f"schedule={name}: only torch's own schedule object emits its actions")


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> tuple[StageAction, ...]:
    warm = min(microbatches, ranks - rank)
    found = [StageAction(rank, "F", m) for m in range(warm)]
    for m in range(microbatches):
        found.append(StageAction(rank, "B", m))
        if m + warm < microbatches:
            found.append(StageAction(rank, "F", m + warm))
    return tuple(found)


def _interleaved(
    rank: int, ranks: int, microbatches: int, per_rank: int
) -> tuple[StageAction, ...]:
    """Return one rank's actions, in rounds of as many microbatches as divide them evenly."""
    group = microbatches // max(1, microbatches // ranks)
    total = microbatches * per_rank

    def place(step: int) -> tuple[int, int]:
        """Return the local stage and microbatch of a forward."""
        whole, rest = divmod(step, group * per_rank)
        return rest // group, whole * group + rest % group

    warm = min(total, (per_rank - 1) * group + 2 * (ranks - 1 - rank))

    def forward(step: int) -> StageAction:
        local, m = place(step)
        return StageAction(rank + local * ranks, "F", m)

    def backward(step: int) -> StageAction:
        local, m = place(step)
        return StageAction(rank + (per_rank - 1 - local) * ranks, "B", m)

    found = [forward(step) for step in range(warm)]
    for step in range(total):
        if step + warm < total:
            found.append(forward(step + warm))
        found.append(backward(step))
    return tuple(found)


class OrderedAction(NamedTuple):
    """Action in an order in which each comes after those that it waits for.

    Attributes:
        rank: that runs it.
        stage: whose time it takes.
        part: of that time: 0 forward, 1 whole backward, 2 gradient of the input, 3 of the weights.
        after: number of the action that it waits for beside its rank's last one; -1: none.
        sent: that one is on another rank.
    """

    rank: int
    stage: int
    part: int
    after: int
    sent: bool


def ordered(actions: Actions) -> tuple[OrderedAction, ...]:
    """Return the actions of all ranks in one order, which no time changes."""
    last = max(a.stage for own in actions for a in own)
    owner = {a.stage: rank for rank, own in enumerate(actions) for a in own}
    done: dict[tuple[int, str, int], int] = {}
    found: list[OrderedAction] = []
    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            while at[rank] < len(own):
                stage, kind, m = own[at[rank]]
                needs = None
                if kind == "F":
                    needs = (stage - 1, "F", m) if stage else None
                elif kind != "W":
                    needs = (stage, "F", m) if stage == last else (stage + 1, "B", m)
                after = -1 if needs is None else done.get(needs, -2)
                if after == -2:
                    break
                if kind != "W":
                    done[stage, "F" if kind == "F" else "B", m] = len(found)
                sent = needs is not None and owner[needs[0]] != rank
                found.append(OrderedAction(rank, stage, "FBIW".index(kind), after, sent))
                at[rank] += 1
                moved = True
    assert all(n == len(own) for n, own in zip(at, actions, strict=True)), "a rank waits for ever"
    return tuple(found)


@lru_cache(maxsize=256)
def _ordered(name: str, ranks: int, microbatches: int, per_rank: int) -> tuple[OrderedAction, ...]:
    return ordered(schedule(name, ranks, microbatches, per_rank))


def simulate(actions: Actions, stages: Sequence[StageTime], send: float) -> float:
    """Return when the last rank is done, in seconds.

    Args:
        actions: of each rank, in order.
        stages: time of each stage.
        send: of an activation or its gradient to another rank, which the sender doesn't wait for.
    """
    return _run(ordered(actions), stages, send)


def spans_of(
    actions: Actions, stages: Sequence[StageTime], send: float
) -> list[list[tuple[StageAction, float, float]]]:
    """Return action, start and seconds of all that each rank does, in order.

    Args:
        actions: of each rank, in order.
        stages: time of each stage.
        send: see `simulate`.
    """
    order, lengths = ordered(actions), _lengths(stages)
    waiting = [iter(own) for own in actions]
    found: list[list[tuple[StageAction, float, float]]] = [[] for _ in actions]
    for one, end in zip(order, _ends(order, lengths, send), strict=True):
        length = lengths[one.stage][one.part]
        found[one.rank].append((next(waiting[one.rank]), end - length, length))
    return found


def _run(order: Sequence[OrderedAction], stages: Sequence[StageTime], send: float) -> float:
    return max(_ends(order, _lengths(stages), send))


def _lengths(stages: Sequence[StageTime]) -> list[tuple[float, ...]]:
    """Return seconds of each stage by part (see `OrderedAction`)."""
    return [(t.forward, t.backward, t.backward - t.weights, t.weights) for t in stages]


def _ends(
    order: Sequence[OrderedAction], lengths: Sequence[tuple[float, ...]], send: float
) -> list[float]:
    """Return when each action ends, in seconds."""
    clock: dict[int, float] = {}
    ends: list[float] = []
    for rank, stage, part, after, sent in order:
        start = clock.get(rank, 0.0)
        if after >= 0:
            ready = ends[after] + send if sent else ends[after]
            if ready > start:
                start = ready
        clock[rank] = end = start + lengths[stage][part]
        ends.append(end)
    return ends


def pipeline_seconds(
    name: str, stages: Sequence[StageTime], ranks: int, microbatches: int, send: float
) -> float:
    """Return the time of a step's microbatches through a pipeline, in seconds.

    Once all ranks are busy, further microbatches take equally long, so few are simulated. A number
    that rounds of `interleaved` don't divide takes its share of the next one that they do.

    Args:
        name: a schedule that `schedule` knows.
        stages: time of each stage.
        ranks: of the pipeline.
        microbatches: of a step.
        send: of an activation or its gradient to another rank.
    """
    per_rank = len(stages) // ranks
    uneven = microbatches % max(1, microbatches // ranks) or microbatches > 2 * ranks
    if name == INTERLEAVED and per_rank > 1 and uneven and microbatches % ranks:
        whole = -(-microbatches // ranks) * ranks
        return pipeline_seconds(name, stages, ranks, whole, send) * microbatches / whole
    few = 2 * ranks + microbatches % ranks
    if microbatches <= few:
        return _run(_ordered(name, ranks, microbatches, per_rank), stages, send)
    found = _run(_ordered(name, ranks, few, per_rank), stages, send)
    less = _run(_ordered(name, ranks, few - ranks, per_rank), stages, send)
    return found + (microbatches - few) / ranks * (found - less)
