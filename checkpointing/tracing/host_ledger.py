"""Offloads counted without moving anything: for tensors that have no values.

    buffers = HostLedger.instead(ac)
    with Meter(model, buffers) as meter: ...

The same tensors leave as with the Offloader, but at once: the last ones, which the Offloader keeps
on the device while they are on their way (`window_bytes`), are on the host here. (Activation
memory.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from checkpointing.apply import ActivationCheckpointing
from checkpointing.offload import Offloader


class HostLedger(Offloader):
    """Offloader that counts a storage as the host's instead of moving it.

    Attributes:
        held_bytes: of all storages on the host.
    """

    def __init__(self, min_bytes: int, host_bytes: int, device: torch.device) -> None:
        super().__init__(min_bytes, host_bytes, device)
        self.held_bytes = 0
        self._twins: weakref.WeakKeyDictionary[UntypedStorage, weakref.ref[_Twin]]
        self._twins = weakref.WeakKeyDictionary()
        self._all: weakref.WeakSet[_Twin] = weakref.WeakSet()

    @staticmethod
    def instead(ac: ActivationCheckpointing) -> Callable[[], Sequence[Tensor]]:
        """Put a ledger in the place of an offloader, if there is one; return its `buffers`."""
        if ac.offloader is None:
            return tuple
        ac.offloader = ledger = HostLedger.like(ac.offloader)
        return ledger.buffers

    @staticmethod
    def like(other: Offloader) -> HostLedger:
        """Return a ledger with the limits and the device of an offloader."""
        return HostLedger(other.min_bytes, other.memory.host_bytes, other.device)

    def buffers(self) -> list[Tensor]:
        """Host memory as it is now, one tensor for each storage."""
        return [twin.host for twin in self._all]

    def buffer_of(self, t: Tensor) -> Tensor | None:
        """Return the host memory of a tensor's storage, of any shape; None: it isn't there."""
        known = self._twins.get(t.untyped_storage())
        twin = known() if known else None
        return None if twin is None else twin.host

    def put(self, t: Tensor, owned: list[dict[str, Any]] | None = None) -> Any:
        """Return the handle that counts `t` as the host's; None if it stays (see `Offloader.put`).

        Args:
            t: any shape.
            owned: parameters of the module that saves `t`.
        """
        reason = self._stays(t, owned or [])
        if reason:
            return self._stay(reason, t)
        storage = t.untyped_storage()
        known = self._twins.get(storage)
        twin = known() if known else None
        if twin is None:
            if self.held_bytes + storage.nbytes() > self.memory.host_bytes:
                return self._stay("no room on the host", t)
            twin = _Twin(self, t)
            self._twins[storage] = weakref.ref(twin)
            self._all.add(twin)
        return _View(twin, t)


class _Twin:
    """Bytes of a storage on the host, and on the device again while a handle has them there."""

    def __init__(self, ledger: HostLedger, t: Tensor) -> None:
        self.ledger, self.num_bytes = ledger, t.untyped_storage().nbytes()
        self.host = t.new_empty(self.num_bytes, dtype=torch.uint8)
        self.here: weakref.ref[Tensor] | None = None
        ledger.held_bytes += self.num_bytes

    def back(self) -> Tensor:
        here = self.here() if self.here else None
        if here is None:
            here = torch.empty_like(self.host)
            self.here = weakref.ref(here)
        return here

    def __del__(self) -> None:
        self.ledger.held_bytes -= self.num_bytes


class _View:
    """Handle of a tensor that waits on the host."""

    def __init__(self, twin: _Twin, t: Tensor) -> None:
        self.twin, self.dtype = twin, t.dtype
        self.place = t.size(), t.stride(), t.storage_offset()

    def get(self) -> Tensor:
        return self.twin.back().view(self.dtype).as_strided(*self.place)
