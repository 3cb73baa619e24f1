"""Ranks as threads of one process that send each other tensors."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

PATIENCE_S = 2.0


class Link:
    """Sends and receives for one rank, and counts the elements that it sends."""

    def __init__(self, rank: int, world: int, boxes: dict[tuple[int, int], queue.Queue]) -> None:
        """Connect a rank to the queues between all pairs of ranks."""
        self.rank, self.world, self._boxes = rank, world, boxes
        self.sent: list[tuple[int, int]] = []  # (to, elements)

    def send(self, to: int, tensor: Tensor) -> None:
        """Send a copy of a tensor; returns at once."""
        assert 0 <= to < self.world and to != self.rank, f"rank {self.rank} sends to {to}"
        self.sent.append((to, tensor.numel()))
        self._boxes[self.rank, to].put(tensor.clone())

    def receive(self, source: int) -> Tensor:
        """Return the next tensor from a rank."""
        try:
            return self._boxes[source, self.rank].get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"rank {self.rank} waits for rank {source} for ever") from None


def run(world: int, fn: Callable[[Link], Any]) -> tuple[list[Any], list[Link]]:
    """Run a function on all ranks and return its results, and the links.

    Raises:
        Exception: the first error of a rank.
        AssertionError: a message that nobody received.
    """
    boxes: dict[tuple[int, int], queue.Queue] = defaultdict(queue.Queue)
    for key in [(a, b) for a in range(world) for b in range(world)]:
        boxes[key]
    links = [Link(rank, world, boxes) for rank in range(world)]
    results: list[Any] = [None] * world
    errors: list[Exception] = []

    def one(rank: int) -> None:
        try:
            results[rank] = fn(links[rank])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    left = [key for key, box in boxes.items() if not box.empty()]
    assert not left, f"messages that no rank received (from, to): {left}"
    return results, links
