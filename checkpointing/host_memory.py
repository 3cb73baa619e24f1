"""Memory of the host for what waits there, and the copies to it and back.

(Activation memory, not saved training state.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Mark = Any  # the end of a copy; None: it has ended


@dataclass(eq=False)
class Buffer:
    """A piece of the host's memory, and the end of the last copy that touched it."""

    bytes: Tensor
    last: Mark = None


class HostCopies(Protocol):
    """How bytes move between a device and the host; nothing here makes the host wait."""

    def rounded(self, num_bytes: int) -> int:
        """Bytes that a buffer for so many really takes."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """New bytes of the host, uint8."""
        ...

    def out(self, here: Tensor, host: Tensor, after: Mark) -> Mark:
        """Copies to the host what is computed by now, once `after` has ended."""
        ...

    def back(self, host: Tensor, after: Mark) -> tuple[Tensor, Mark]:
        """New bytes of the device with what the host has, and when they are there."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is computed from now on comes after `mark`."""
        ...

    def trim(self) -> None:
        """Lets the system have host buffers that nobody holds any more."""
        ...


class PlainCopies:
    """Copies that have ended when they return: the device is the host."""

    def rounded(self, num_bytes: int) -> int:
        return num_bytes

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def out(self, here: Tensor, host: Tensor, after: Mark) -> Mark:
        host.copy_(here)

    def back(self, host: Tensor, after: Mark) -> tuple[Tensor, Mark]:
        return torch.empty_like(host).copy_(host), None

    def wait(self, mark: Mark) -> None:
        pass

    def trim(self) -> None:
        pass


class CudaCopies:
    """Pinned buffers, and a stream for each direction, so that both can be busy at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def rounded(self, num_bytes: int) -> int:
        # torch's allocator of pinned memory hands out powers of two.
        return 1 << (num_bytes - 1).bit_length()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def out(self, here: Tensor, host: Tensor, after: Mark) -> Mark:
        return self._copy(self._out, here, host, after)

    def back(self, host: Tensor, after: Mark) -> tuple[Tensor, Mark]:
        # Memory of the computing stream, which the copy waits for: it may be used, and be given
        # to others, in the order of that stream, and the allocator need not know of the copy.
        here = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        return here, self._copy(self._back, host, here, after)

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def trim(self) -> None:
        # Waits for the device; only happens when sizes change and the host is full.
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if empty is not None:
            empty()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: Mark) -> Mark:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


class HostMemory:
    """At most `host_bytes` of buffers, made once and used again by all of their size.

    Attributes:
        held_bytes: of all buffers, waiting for use or in use.
        peak_bytes: most that were held.
    """

    def __init__(self, host_bytes: int, copies: HostCopies) -> None:
        self.host_bytes, self.copies = host_bytes, copies
        self.held_bytes = self.peak_bytes = self.num_made = 0
        self._free: dict[int, list[Buffer]] = {}
        # Whose owner died, at a moment that may lie inside any method here.
        self._returned: deque[Buffer] = deque()

    def take(self, num_bytes: int) -> Buffer | None:
        """A buffer of at least so many bytes; None: there is no room."""
        self._sort_returned()
        size = self.copies.rounded(num_bytes)
        if self._free.get(size):
            return self._free[size].pop()
        if self.held_bytes + size > self.host_bytes:
            self._let_go(size)
        if self.held_bytes + size > self.host_bytes:
            return None
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.num_made += 1
        return Buffer(self.copies.host_buffer(size))

    def give(self, buffer: Buffer) -> None:
        """The buffer may be used by others."""
        self._returned.append(buffer)

    def release(self) -> None:
        """Lets go of every buffer that isn't in use."""
        self._sort_returned()
        self._let_go(self.host_bytes)

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.bytes.numel(), []).append(buffer)

    def _let_go(self, size: int) -> None:
        """Drops free buffers until one of `size` fits."""
        for of_size, buffers in self._free.items():
            while buffers and self.held_bytes + size > self.host_bytes:
                buffers.pop()
                self.held_bytes -= of_size
        self.copies.trim()
