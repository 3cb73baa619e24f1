"""Host memory for offloaded activations, and the copies to it and back.

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
    """Buffer in host memory, and the end of the last copy that touched it."""

    bytes: Tensor
    last: Mark = None


class HostCopies(Protocol):
    """Copies between a device and the host; none of them makes the host wait."""

    def rounded(self, num_bytes: int) -> int:
        """Return the bytes that a buffer of `num_bytes` really takes."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return a new uint8 buffer in host memory, `[num_bytes]`."""
        ...

    def out(self, here: Tensor, host: Tensor, after: Mark) -> Mark:
        """Copy bytes to the host after the queued work and after `after`; return the copy's end.

        Args:
            here: `[N]` uint8 on the device.
            host: `[N]` uint8 in host memory.
            after: event to wait for first.
        """
        ...

    def back(self, host: Tensor, after: Mark) -> tuple[Tensor, Mark]:
        """Return a new device buffer with the host's bytes, and the copy's end.

        Args:
            host: `[N]` uint8 in host memory.
            after: event to wait for first.
        """
        ...

    def wait(self, mark: Mark) -> None:
        """Make later work on the device wait for `mark`."""
        ...

    def trim(self) -> None:
        """Return unused host buffers to the system."""
        ...


class PlainCopies:
    """Copies that have ended when they return: the device is the host."""

    def rounded(self, num_bytes: int) -> int:
        """Return `num_bytes` unchanged."""
        return num_bytes

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return a new uint8 buffer, `[num_bytes]`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def out(self, here: Tensor, host: Tensor, after: Mark) -> Mark:
        """Copy `here` to `host` at once.

        Args:
            here: `[N]` uint8.
            host: `[N]` uint8.
            after: unused.
        """
        host.copy_(here)

    def back(self, host: Tensor, after: Mark) -> tuple[Tensor, Mark]:
        """Return a copy of `host`.

        Args:
            host: `[N]` uint8.
            after: unused.
        """
        return torch.empty_like(host).copy_(host), None

    def wait(self, mark: Mark) -> None:
        """Do nothing: copies have ended."""
        pass

    def trim(self) -> None:
        """Do nothing: buffers aren't pinned."""
        pass


class CudaCopies:
    """Pinned buffers, and a stream for each direction, so that both can be busy at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def rounded(self, num_bytes: int) -> int:
        """Return the next power of two, which torch's allocator of pinned memory hands out."""
        # torch's allocator of pinned memory hands out powers of two.
        return 1 << (num_bytes - 1).bit_length()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return a new pinned uint8 buffer, `[num_bytes]`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def out(self, here: Tensor, host: Tensor, after: Mark) -> Mark:
        """Copy to the host on a stream of its own.

        Args:
            here: `[N]` uint8 on the device.
            host: `[N]` uint8, pinned.
            after: event to wait for first.
        """
        return self._copy(self._out, here, host, after)

    def back(self, host: Tensor, after: Mark) -> tuple[Tensor, Mark]:
        """Copy to a new device buffer on a stream of its own.

        Args:
            host: `[N]` uint8, pinned.
            after: event to wait for first.
        """
        # Memory of the computing stream, which the copy waits for: it may be used and reused in
        # the order of that stream, and the allocator needn't know of the copy.
        here = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        return here, self._copy(self._back, host, here, after)

    def wait(self, mark: Mark) -> None:
        """Make the computing stream wait for `mark`."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def trim(self) -> None:
        """Empty torch's cache of pinned memory; this waits for the device."""
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
    """Pool of at most `host_bytes` of buffers, reused by equal size.

    Attributes:
        held_bytes: bytes of all buffers, free or in use.
        peak_bytes: most that were held.
    """

    def __init__(self, host_bytes: int, copies: HostCopies) -> None:
        self.host_bytes, self.copies = host_bytes, copies
        self.held_bytes = self.peak_bytes = self.num_made = 0
        self._free: dict[int, list[Buffer]] = {}
        # Buffers whose owner was freed, possibly inside a method of this class.
        self._returned: deque[Buffer] = deque()

    def take(self, num_bytes: int) -> Buffer | None:
        """Return a buffer of at least `num_bytes` bytes, or None if the pool is full."""
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
        """Return a buffer to the pool."""
        self._returned.append(buffer)

    def release(self) -> None:
        """Free every buffer that isn't in use."""
        self._sort_returned()
        self._let_go(self.host_bytes)

    def _sort_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._free.setdefault(buffer.bytes.numel(), []).append(buffer)

    def _let_go(self, size: int) -> None:
        """Free unused buffers until one of `size` fits."""
        for of_size, buffers in self._free.items():
            while buffers and self.held_bytes + size > self.host_bytes:
                buffers.pop()
                self.held_bytes -= of_size
        self.copies.trim()
