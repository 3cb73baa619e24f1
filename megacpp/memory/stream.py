"""Allocations of a step, in order: a trace makes them and an allocator replays them.

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
    """Allocation of one tensor's memory.

    Attributes:
        bytes: as the tensor requests; an allocator rounds it.
        component: a name of components.py.
        part: part of the model (`blocks.3`, `head`, ...), or empty.
        name: operator, module and shape, for people.
        stream: number of the device's stream; 0 computes, FSDP2 gathers and reduces on others.
    """

    bytes: int
    component: str
    part: str = ""
    name: str = ""
    stream: int = 0


@dataclass
class Stream:
    """Blocks of a step, with their allocations and frees in order.

    Attributes:
        blocks: all blocks, by number.
        events: numbers of blocks; the first occurrence allocates a block, the second frees it.
        marks: (number of the next event, name of the part that begins there), ascending.
    """

    blocks: list[StreamBlock] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def allocate(self, block: StreamBlock) -> int:
        """Append a new block and its allocation, and return the block's number."""
        self.blocks.append(block)
        self.events.append(len(self.blocks) - 1)
        return len(self.blocks) - 1

    def free(self, number: int) -> None:
        """Append the free of a block."""
        self.events.append(number)

    def rest(self, block: StreamBlock) -> None:
        """Add a block that was allocated before the first event and stays."""
        self.blocks.append(block)
        self.events.insert(0, len(self.blocks) - 1)
        self.marks = [(event + 1, name) for event, name in self.marks]

    def mark(self, name: str) -> None:
        """Begin a part of the step at the next event."""
        self.marks.append((len(self.events), name))

    def changes(self) -> Iterator[tuple[int, int]]:
        """Yield (block, +1 for an allocation or -1 for a free) of every event."""
        alive: set[int] = set()
        for number in self.events:
            if number in alive:
                alive.discard(number)
                yield number, -1
            else:
                alive.add(number)
                yield number, 1

    def timeline(self) -> list[int]:
        """Return the bytes alive after each event."""
        found, now = [], 0
        for number, sign in self.changes():
            now += sign * self.blocks[number].bytes
            found.append(now)
        return found

    def peak(self) -> tuple[int, int]:
        """Return the first event after which most bytes are alive, and those bytes."""
        line = self.timeline()
        most = max(line, default=0)
        return (line.index(most), most) if line else (-1, 0)

    def alive_at(self, event: int) -> list[int]:
        """Return the numbers of blocks alive after an event."""
        alive: set[int] = set()
        for index, (number, sign) in enumerate(self.changes()):
            if index > event:
                break
            (alive.add if sign > 0 else alive.discard)(number)
        return sorted(alive)

    def by_component(self, event: int) -> dict[str, int]:
        """Return the bytes alive after an event, by component."""
        return sizes(self.blocks[number] for number in self.alive_at(event))

    def where(self, event: int) -> str:
        """Return the name of the last mark at or before an event; empty: none."""
        starts = [start for start, _ in self.marks]
        place = bisect_right(starts, event) - 1
        return self.marks[place][1] if place >= 0 else ""


def sizes(blocks: Iterable[StreamBlock]) -> dict[str, int]:
    """Return the bytes of blocks, by component."""
    found: Counter[str] = Counter()
    for block in blocks:
        found[block.component] += block.bytes
    return dict(found)
