"""Simulate one rank's streams: tasks that wait for their stream and for other tasks.

    timeline = run([Task("gather", 0.1), Task("compute", 1.0, (0,))])
    timeline.end                                    # 1.1 s
    run(fsdp_tasks(units, microbatches=1, prefetch=1)).exposed    # seconds without compute

Tasks of a stream run in the order in which they are issued, as kernels on a CUDA stream do.
Gathers and reductions share one stream: they would share the same links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE, LINK = "compute", "link"
STEADY = 3  # microbatches that are simulated; all others take as long as the last
ALIKE = 8  # equal units in a row that are simulated; all others take as long as the last


class Task(NamedTuple):
    """Work of one stream.

    Attributes:
        stream: name of the stream.
        seconds: its time once it runs.
        after: numbers of tasks that have to end first.
        name: for a timeline.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Timeline:
    """Start and end of each task, in seconds."""

    tasks: Sequence[Task]
    starts: Sequence[float]
    ends: Sequence[float]

    @property
    def end(self) -> float:
        """End of the last task."""
        return max(self.ends, default=0.0)

    def busy(self, stream: str) -> float:
        """Seconds in which a stream runs tasks."""
        return sum(task.seconds for task in self.tasks if task.stream == stream)

    @property
    def exposed(self) -> float:
        """Seconds in which the compute stream waits."""
        return self.end - self.busy(COMPUTE)


def run(tasks: Sequence[Task]) -> Timeline:
    """Return when each task runs, given in the order in which they are issued."""
    free: dict[str, float] = {}
    starts: list[float] = []
    ends: list[float] = []
    for stream, length, after, _ in tasks:
        start = free.get(stream, 0.0)
        for number in after:
            if ends[number] > start:
                start = ends[number]
        free[stream] = end = start + length
        starts.append(start)
        ends.append(end)
    return Timeline(tasks, starts, ends)


class UnitTime(NamedTuple):
    """Seconds of one FSDP unit of a microbatch.

    Attributes:
        forward: compute.
        backward: compute, with what is recomputed.
        gather: all-gather of its parameters; 0: nothing is sharded.
        reduce: reduce-scatter of its gradients.
        name: for a timeline.
    """

    forward: float
    backward: float
    gather: float = 0.0
    reduce: float = 0.0
    name: str = ""


def fsdp_tasks(
    units: Sequence[UnitTime],
    microbatches: int,
    prefetch: int | None = 1,
    reshard: bool = True,
    reduce_each: bool = False,
    resident: bool = False,
) -> list[Task]:
    """Return the tasks of the forwards and backwards of all microbatches, as FSDP2 issues them.

    Args:
        units: in the order of the forward.
        microbatches: of a step.
        prefetch: units whose gather may run ahead of the compute of the current one; None: any.
        reshard: gather again in the backward.
        reduce_each: reduce gradients in every microbatch, not in the last alone.
        resident: gather in the first forward of the step alone, whatever `reshard`.
    """
    tasks: list[Task] = []
    computed: list[int] = []  # numbers of the compute tasks so far
    pending: Task | None = None

    def gathered(unit: UnitTime) -> tuple[int, ...]:
        if not unit.gather:
            return ()
        behind = len(computed) - 1 - (len(computed) if prefetch is None else prefetch)
        after = (computed[behind],) if behind >= 0 else ()
        tasks.append(Task(LINK, unit.gather, after, f"gather {unit.name}"))
        return (len(tasks) - 1,)

    for number in range(microbatches):
        again = number == 0 or not resident
        for unit in units:
            after = gathered(unit) if again else ()
            tasks.append(Task(COMPUTE, unit.forward, after, f"forward {unit.name}"))
            computed.append(len(tasks) - 1)
        last = len(units) - 1
        waiting: tuple[int, ...] = ()  # gathers are issued before the reductions they run beside
        for place in range(last, -1, -1):
            unit = units[place]
            if reshard and not resident and place < last:
                waiting = gathered(unit)
            if place < last and pending:
                tasks.append(pending)
            tasks.append(Task(COMPUTE, unit.backward, waiting, f"backward {unit.name}"))
            computed.append(len(tasks) - 1)
            pending = None
            if unit.reduce and (reduce_each or number == microbatches - 1):
                pending = Task(LINK, unit.reduce, (computed[-1],), f"reduce {unit.name}")
        if pending:
            tasks.append(pending)
    return tasks


def fsdp_seconds(
    units: Sequence[UnitTime],
    microbatches: int,
    prefetch: int | None = 1,
    reshard: bool = True,
    reduce_each: bool = False,
    resident: bool = False,
) -> tuple[float, float]:
    """Return the time of all microbatches and its part without compute, in seconds.

    Equal units in the middle of a model take as long as each other, and so do microbatches in the
    middle of a step, so few are simulated.

    Args:
        units: in the order of the forward.
        microbatches: of a step.
        prefetch: see `fsdp_tasks`.
        reshard: see `fsdp_tasks`.
        reduce_each: see `fsdp_tasks`.
        resident: see `fsdp_tasks`.
    """
    at, count = _longest_run(units)
    kept = units
    if count > ALIKE:
        kept = [*units[: at + ALIKE], *units[at + count :]]

    def simulated(units: Sequence[UnitTime], number: int) -> float:
        return run(fsdp_tasks(units, number, prefetch, reshard, reduce_each, resident)).end

    def of_units(units: Sequence[UnitTime]) -> float:
        few = min(microbatches, STEADY)
        found = simulated(units, few)
        if microbatches > few:
            found += (microbatches - few) * (found - simulated(units, few - 1))
        return found

    found = of_units(kept)
    if count > ALIKE:
        found += (count - ALIKE) * (found - of_units([*kept[:at], *kept[at + 1 :]]))
    compute = microbatches * sum(unit.forward + unit.backward for unit in units)
    return found, max(0.0, found - compute)


def _longest_run(units: Sequence[UnitTime]) -> tuple[int, int]:
    """Return start and length of the longest run of equal units."""
    best, at = (0, 0), 0
    for place in range(1, len(units) + 1):
        if place == len(units) or units[place] != units[at]:
            best, at = max(best, (at, place - at), key=lambda found: found[1]), place
    return best
