"""What an Offloader moves, told without moving it: for tensors that have no values.

    keeper.offloader = ledger = HostLedger.like(keeper.offloader)
    with Meter(model, ledger.buffers) as meter: ...

The same tensors leave as with the Offloader, at once: the last ones, which it keeps on the device
while they are on their way (`window_bytes`), are on the host here. (Activation memory.)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from checkpointing.offload import Offloader


class HostLedger(Offloader):
    """Gives every storage that leaves a twin, which counts as the host's.

    Attributes:
        held_bytes: of all twins.
    """

    def __init__(self, min_bytes: int, host_bytes: int, device: torch.device) -> None:
        super().__init__(min_bytes, host_bytes, device)
        self.held_bytes = 0
        self._twins: weakref.WeakKeyDictionary[UntypedStorage, weakref.ref[_Twin]]
        self._twins = weakref.WeakKeyDictionary()
        self._all: weakref.WeakSet[_Twin] = weakref.WeakSet()

    @staticmethod
    def like(other: Offloader) -> HostLedger:
        return HostLedger(other.min_bytes, other.memory.host_bytes, other.device)

    def buffers(self) -> list[Tensor]:
        """Memory of the host, as it is now."""
        return [twin.host for twin in self._all]

    def put(self, t: Tensor, owned: list[dict[str, Any]] | None = None) -> Any:
        """As `Offloader.put`."""
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
    """A storage's bytes on the host, and on the device again while somebody has them there."""

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
    """A tensor that waits on the host."""

    def __init__(self, twin: _Twin, t: Tensor) -> None:
        self.twin, self.dtype = twin, t.dtype
        self.place = t.size(), t.stride(), t.storage_offset()

    def get(self) -> Tensor:
        return self.twin.back().view(self.dtype).as_strided(*self.place)
