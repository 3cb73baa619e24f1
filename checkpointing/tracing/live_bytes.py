"""Bytes of live tensors while a piece of code runs; needs no GPU.

    with LiveBytes() as live:
        loss(x).backward()
    live.peak      # most bytes alive at once among tensors made inside the block
    live.largest   # bytes of the largest single storage made inside
    live.alive()   # bytes alive now, also of storages that were resized behind the operators' back

Every operator's outputs pass through the dispatch mode, in the backward too. A storage counts
once, however many views it has, from the operator that made it to the moment it is freed. Scratch
memory inside a kernel isn't seen, nor are storages from before the block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts live bytes of what is made inside; storages that come in as arguments are left out.

    Attributes:
        now: bytes alive.
        peak: most bytes alive at once.
        largest: bytes of the largest storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._sizes: dict[int, int] = {}
        self._foreign: dict[int, UntypedStorage] = {}
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and id(t.untyped_storage()) not in self._sizes:
                self._foreign.setdefault(id(t.untyped_storage()), t.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._count(t.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def restart(self) -> None:
        """Begin another peak with what is alive."""
        self.peak = self.now

    def alive(self) -> int:
        """Return bytes as they are now: FSDP2 frees and fills storages without an operator."""
        storages = [reference() for reference in [*self._alive.values()]]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def _count(self, storage: UntypedStorage) -> None:
        key = id(storage)
        if key in self._foreign:
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._freed, key)
            self._alive[key] = weakref.ref(storage)
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.largest = max(self.largest, storage.nbytes())

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]
