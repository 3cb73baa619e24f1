"""Offload of saved tensors to host memory until the backward.

    forward   x1 x2 x3 ...   each is copied out while the next ones are computed, then freed
    backward  ... x3 x2 x1   each is fetched while the backward of later ones is computed

The unit is a storage: it moves once, however many views of it are saved, and comes back with the
same bits and strides. On a GPU copies have their own streams and the host waits for none of them;
on a CPU a copy has ended when it returns, and everything else is the same.

(Activation memory, not saved training state.)
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpointing.host_memory import Buffer, CudaCopies, HostCopies, HostMemory, PlainCopies
from megacpp.model.recompute import recomputing
from megacpp.torch_extras import is_dtensor

MIB = 1 << 20


@dataclass
class OffloadTraffic:
    """Bytes moved, and tensors that stayed on the device by reason (numbers and bytes)."""

    out_bytes: int = 0
    back_bytes: int = 0
    stayed: Counter[str] = field(default_factory=Counter)
    stayed_bytes: Counter[str] = field(default_factory=Counter)


class Offloader:
    """Transfer of tensors to the host and back.

    Args:
        min_bytes: smaller tensors stay on the device.
        host_bytes: most bytes of host memory; further tensors stay.
        device: device of the tensors.
        window_bytes: most bytes on the device on their way out, and as many on their way back. The
            last tensors of a forward therefore never leave.
        ahead: number of tensors that are fetched in advance.
        copies: implementation of copies; chosen by `device` by default.
    """

    def __init__(
        self,
        min_bytes: int,
        host_bytes: int,
        device: torch.device,
        window_bytes: int = 256 * MIB,
        ahead: int = 2,
        copies: HostCopies | None = None,
    ) -> None:
        self.min_bytes, self.device = min_bytes, device
        self.window_bytes, self.ahead = window_bytes, ahead
        if copies is None:
            copies = CudaCopies(device) if device.type == "cuda" else PlainCopies()
        self.copies, self.memory = copies, HostMemory(host_bytes, copies)
        self.traffic = OffloadTraffic()
        self._known: weakref.WeakKeyDictionary[UntypedStorage, weakref.ref[_StoredTensor]]
        self._known = weakref.WeakKeyDictionary()
        self._leaving: deque[weakref.ref[_StoredTensor]] = deque()
        self._coming: list[weakref.ref[_StoredTensor]] = []
        self._order: list[weakref.ref[_StoredTensor]] = []

    def begin(self) -> None:
        """Begin another forward, which has its own backward."""
        self._order = []

    def follow(self, root: nn.Module) -> None:
        """Call `begin` at every forward of a model or of a pipeline stage."""
        root.register_forward_pre_hook(lambda *_: self.begin())

    def store_for(self, module: nn.Module) -> Callable[[Tensor], Tensor | Parked]:
        """Return `put` for tensors that `module` saves; its parameters stay, also gathered ones."""
        owned: list[dict[str, Any]] = []

        def store(t: Tensor) -> Tensor | Parked:
            if not owned:
                owned.extend(m._parameters for m in module.modules() if m._parameters)
            return self.put(t, owned) or t

        return store

    def put(self, t: Tensor, owned: list[dict[str, Any]] | None = None) -> Parked | None:
        """Copy `t` to the host and return its handle; None if it stays, which `traffic` counts.

        Args:
            t: any shape.
            owned: parameters of the module that saves `t`.
        """
        reason = self._stays(t, owned or [])
        if reason:
            return self._stay(reason, t)
        storage = t.untyped_storage()
        known = self._known.get(storage)
        entry = known() if known else None
        if entry is None or entry.version != t._version:
            buffer = self.memory.take(storage.nbytes())
            if buffer is None:
                return self._stay("no room on the host", t)
            entry = _StoredTensor(self, t, buffer, self._order)
            self._known[storage] = weakref.ref(entry)
            self._order.append(weakref.ref(entry))
            self._leaving.append(weakref.ref(entry))
            self._shrink_window()
        return Parked(entry, t)

    def _stays(self, t: Tensor, owned: list[dict[str, Any]]) -> str:
        """Return the reason why a tensor stays, or nothing."""
        if is_traceable_wrapper_subclass(t) or t.layout != torch.strided:
            return "more than strided bytes"
        storage = t.untyped_storage()
        # An expanded tensor is larger than its storage, a slice smaller: compare the smaller size.
        if min(t.numel() * t.itemsize, storage.nbytes()) < max(self.min_bytes, 1):
            return "small"
        if t.device.type != self.device.type:
            return "not on the device"
        if t.is_conj() or t.is_neg():
            return "more than strided bytes"
        if isinstance(t if t._base is None else t._base, nn.Parameter):
            return "parameter"
        address = storage._cdata
        for parameters in owned:
            if any(p is not None and _address(p) == address for p in parameters.values()):
                return "parameter"
        return "needed at once" if recomputing() else ""

    def _stay(self, reason: str, t: Tensor) -> None:
        self.traffic.stayed[reason] += 1
        self.traffic.stayed_bytes[reason] += t.numel() * t.itemsize

    def _shrink_window(self) -> None:
        """Free the oldest outgoing tensors beyond the window, once their copies have ended."""
        leaving = [e for e in (reference() for reference in self._leaving) if e is not None]
        total = sum(entry.num_bytes for entry in leaving)
        for entry in leaving:
            if total <= self.window_bytes:
                break
            total -= entry.num_bytes
            entry.leave()
        self._leaving = deque(weakref.ref(e) for e in leaving if e.source is not None)

    def fetch_before(self, order: list[weakref.ref[_StoredTensor]], place: int) -> None:
        """Start to fetch the tensors that were put just before, as far as the window allows."""
        coming = [e for e in (r() for r in self._coming) if e is not None and not e.arrived]
        room, left = self.window_bytes - sum(e.num_bytes for e in coming), self.ahead
        while place > 0 and left > 0:
            place -= 1
            entry = order[place]()
            # Only a second backward of the same graph takes twice; it waits for its copy.
            if entry is None or (entry.last and entry.arrived):
                continue
            left -= 1
            if entry.source is None and entry.last is None:
                room -= entry.num_bytes
                if room < 0:
                    break
                entry.fetch()
                coming.append(entry)
        self._coming = [weakref.ref(e) for e in coming]


class Parked:
    """Handle of a tensor that is stored on the host."""

    __slots__ = ("__weakref__", "_device", "_dtype", "_entry", "_offset", "_size", "_stride")

    def __init__(self, entry: _StoredTensor, t: Tensor) -> None:
        self._entry, self._dtype, self._device = entry, t.dtype, t.device
        self._size, self._stride, self._offset = t.size(), t.stride(), t.storage_offset()
        entry.handles.add(self)

    def get(self) -> Tensor:
        """Return the tensor with the same bits, shape and strides; views share a storage again.

        Raises:
            RuntimeError: the tensor was changed in place while it was being copied.
        """
        storage = self._entry.take(self)
        whole = torch.empty(0, dtype=self._dtype, device=self._device)
        return whole.set_(storage, self._offset, self._size, self._stride)


class _StoredTensor:
    """Storage of a saved tensor: outgoing, on the host, or back on the device.

    Attributes:
        source: the saved tensor, until its copy is known to have ended.
        returned: its bytes on the device, until all handles have taken them.
        last: weak reference to these, valid as long as a caller holds them.
        arrived: a handle was taken, and the computing stream waits for the copy.
    """

    def __init__(
        self, owner: Offloader, t: Tensor, buffer: Buffer, order: list[weakref.ref[_StoredTensor]]
    ) -> None:
        self.owner, self.buffer, self.order, self.place = owner, buffer, order, len(order)
        self.num_bytes, self.version = t.untyped_storage().nbytes(), t._version
        self.source: Tensor | None = t.detach()
        self.returned: Tensor | None = None
        self.last: weakref.ref[UntypedStorage] | None = None
        self.arrived, self.torn = True, False
        self.handles: weakref.WeakSet[Parked] = weakref.WeakSet()
        self.waiting: weakref.WeakSet[Parked] = weakref.WeakSet()
        here = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        buffer.last = owner.copies.out(here, self._host_bytes, buffer.last)
        owner.traffic.out_bytes += self.num_bytes

    @property
    def _host_bytes(self) -> Tensor:
        return self.buffer.bytes[: self.num_bytes]

    def leave(self) -> None:
        """Free the device's memory for later work."""
        assert self.source is not None
        self.owner.copies.wait(self.buffer.last)
        self.torn = self.source._version != self.version
        self.source = None

    def fetch(self) -> None:
        """Start the copy back."""
        copies, buffer = self.owner.copies, self.buffer
        self.returned, buffer.last = copies.back(self._host_bytes, buffer.last)
        self.last = weakref.ref(self.returned.untyped_storage())
        self.owner.traffic.back_bytes += self.num_bytes
        self.arrived, self.waiting = False, weakref.WeakSet(self.handles)

    def take(self, handle: Parked) -> UntypedStorage:
        """Return the storage for one of its handles; start to fetch the next ones."""
        if self.torn or (self.source is not None and self.source._version != self.version):
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after it was kept "
                f"(version {self.version} was on its way to the host)"
            )
        here = self._here(handle)
        self.owner.fetch_before(self.order, self.place)
        return here

    def _here(self, handle: Parked) -> UntypedStorage:
        if self.source is not None:
            return self.source.untyped_storage()
        if self.returned is None:
            asked = self.last() if self.last else None
            if asked is not None:
                return asked
            self.fetch()
        assert self.returned is not None
        if not self.arrived:
            self.owner.copies.wait(self.buffer.last)
            self.arrived = True
        here = self.returned.untyped_storage()
        self.waiting.discard(handle)
        if not self.waiting:
            self.returned = None
        return here

    def __del__(self) -> None:
        # Memory isn't reused before the copies that read or write it have ended.
        if getattr(self, "source", None) is not None or not getattr(self, "arrived", True):
            self.owner.copies.wait(self.buffer.last)
        self.owner.memory.give(self.buffer)


@dataclass(frozen=True, eq=False)
class _Stayed:
    """Tensor that stayed on the device, with autograd's check for in-place changes."""

    t: Tensor
    version: int

    def get(self) -> Tensor:
        if self.t._version != self.version:
            raise RuntimeError(
                "a tensor that the backward needs was changed in place after it was kept "
                f"(version {self.version}, now {self.t._version})"
            )
        return self.t


@contextmanager
def offloaded(offloader: Offloader, module: nn.Module | None = None) -> Iterator[None]:
    """Offload what autograd saves inside the context: one forward, of plain modules.

        with offloaded(offloader, model):
            loss = model(x)
        loss.backward()

    Args:
        offloader: transfer of tensors.
        module: module whose parameters stay; parameters that autograd saves unchanged, or views of
            them, stay in any case.
    """
    store = offloader.store_for(module) if module is not None else offloader.put
    offloader.begin()

    def pack(t: Tensor) -> Parked | _Stayed:
        kept = store(t)
        return kept if isinstance(kept, Parked) else _Stayed(t, t._version)

    with saved_tensors_hooks(pack, lambda kept: kept.get()):
        yield


def _address(p: Tensor) -> int:
    """Return the address of this rank's storage of a parameter."""
    return (p._local_tensor if is_dtensor(p) else p).untyped_storage()._cdata
