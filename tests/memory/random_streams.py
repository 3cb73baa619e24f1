"""Streams of allocations that no step has: sizes and order by chance."""

from __future__ import annotations

import random
from math import log2

from megacpp.memory.stream import Stream, StreamBlock


def by_chance(seed: int, events: int = 600, streams: int = 2, least: int = 16) -> Stream:
    """Sizes up to 128 MiB, those of all magnitudes as often, freed in any order."""
    rng, found, alive = random.Random(seed), Stream(), list[int]()
    for index in range(events):
        if index % 50 == 0:
            found.mark(str(index))
        if alive and rng.random() < 0.48:
            found.free(alive.pop(rng.randrange(len(alive))))
        else:
            size = int(2 ** rng.uniform(log2(least), 27))
            block = StreamBlock(size, rng.choice(("activations", "workspace")))
            block.stream = rng.randrange(streams)
            alive.append(found.allocate(block))
    return found
