"""Models, and an engine that copies as late as it may, for the tests of offload; CPU tensors."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from checkpointing.host_memory import PlainCopies
from checkpointing.offload import MIB, Offloader

CPU = torch.device("cpu")
HOST = 64 * MIB


def offloader(
    min_bytes: int = 1, host_bytes: int = HOST, window_bytes: int = 0, **more: Any
) -> Offloader:
    return Offloader(min_bytes, host_bytes, CPU, window_bytes=window_bytes, **more)


def mlp(layers: int = 4, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(layers)]
    return nn.Sequential(*parts)


def rows(count: int = 16, width: int = 32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


class LateCopies(PlainCopies):
    """Two queues whose copies happen as late as anybody may rely on: when they are waited for.

    Whoever lets go of a tensor, or reads one, before it waited is found out.
    """

    def __init__(self) -> None:
        self.queues: dict[str, deque[tuple[int, Callable[[], None]]]] = {
            "out": deque(),
            "back": deque(),
        }
        self.done: set[int] = set()
        self.count = 0
        self.log: list[tuple[str, int]] = []  # of every copy: direction, its first byte's value
        self.waits = 0

    def out(self, here: Tensor, host: Tensor, after: Any) -> Any:
        source = weakref.ref(here.untyped_storage())

        def copy() -> None:
            storage = source()
            assert storage is not None, "let go of before its copy ended"
            host.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))

        return self._queue("out", copy, after)

    def back(self, host: Tensor, after: Any) -> tuple[Tensor, Any]:
        here = torch.full_like(host, 255)
        target = weakref.ref(here.untyped_storage())

        def copy() -> None:
            storage = target()
            assert storage is not None, "given to others before its copy ended"
            torch.empty(0, dtype=torch.uint8).set_(storage).copy_(host)

        return here, self._queue("back", copy, after)

    def wait(self, mark: Any) -> None:
        self.waits += 1
        self._finish(mark)

    def _queue(self, name: str, copy: Callable[[], None], after: Any) -> Any:
        self.count += 1
        mark = (name, self.count)

        def run() -> None:
            self._finish(after)
            copy()

        self.queues[name].append((self.count, run))
        self.log.append(mark)
        return mark

    def _finish(self, mark: Any) -> None:
        if mark is None or mark[1] in self.done:
            return
        queue = self.queues[mark[0]]
        while mark[1] not in self.done:
            number, run = queue.popleft()
            run()
            self.done.add(number)
