"""The allocations of a step, in order: what a trace gives and what an allocator replays.

Pure data, no torch: blocks of memory with a component (components.py), the events that allocate
and free them, and marks that say which part of the step runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamBlock:
    """One allocation.

    Attributes:
        bytes: as the tensor asks for; an allocator rounds it.
        component: a name of components.py.
        part: of the model (`blocks.3`, `head`, ...), or empty.
        name: operator, module and shape, for people.
        stream: of the device, 0 the one that computes: what FSDP2 gathers and reduces is on others.
    """

    bytes: int
    component: str
    part: str = ""
    name: str = ""
    stream: int = 0


@dataclass
class Stream:
    """Blocks, and what happens to them.

    Attributes:
        events: number of a block; its first occurrence allocates it, its second frees it.
        marks: (number of the event that comes next, what begins there), ascending.
    """

    blocks: list[StreamBlock] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def allocate(self, block: StreamBlock) -> int:
        """Appends a new block and its allocation; its number."""
        self.blocks.append(block)
        self.events.append(len(self.blocks) - 1)
        return len(self.blocks) - 1

    def free(self, number: int) -> None:
        self.events.append(number)

    def mark(self, name: str) -> None:
        self.marks.append((len(self.events), name))

    def changes(self) -> Iterator[tuple[int, int]]:
        """(block, +1 or -1) of every event."""
        alive: set[int] = set()
        for number in self.events:
            if number in alive:
                alive.discard(number)
                yield number, -1
            else:
                alive.add(number)
                yield number, 1

    def timeline(self) -> list[int]:
        """Bytes alive after each event."""
        found, now = [], 0
        for number, sign in self.changes():
            now += sign * self.blocks[number].bytes
            found.append(now)
        return found

    def peak(self) -> tuple[int, int]:
        """The event after which most bytes are alive, the first of them, and how many."""
        line = self.timeline()
        most = max(line, default=0)
        return (line.index(most), most) if line else (-1, 0)

    def alive_at(self, event: int) -> list[int]:
        """Blocks alive after an event."""
        alive: set[int] = set()
        for index, (number, sign) in enumerate(self.changes()):
            if index > event:
                break
            (alive.add if sign > 0 else alive.discard)(number)
        return sorted(alive)

    def by_component(self, event: int) -> dict[str, int]:
        """Bytes of each component that are alive after an event."""
        return sizes(self.blocks[number] for number in self.alive_at(event))

    def where(self, event: int) -> str:
        """The mark that an event lies behind."""
        starts = [start for start, _ in self.marks]
        place = bisect_right(starts, event) - 1
        return self.marks[place][1] if place >= 0 else ""


def sizes(blocks: Iterable[StreamBlock]) -> dict[str, int]:
    """Bytes by component."""
    found: Counter[str] = Counter()
    for block in blocks:
        found[block.component] += block.bytes
    return dict(found)
