"""Storages that a forward allocates and saves for its backward, each from allocation to free.

    with Meter(model) as meter:
        model(ids_BT, labels_BT, docs).loss_sum.backward()
    meter.kept         # allocations alive when the forward had ended
    meter.flops        # by part of the model and phase
    meter.timeline()   # bytes alive after each operator

(Activation memory.) A storage counts once, however many views it has, and belongs to the part of
the model whose forward made it: the residual stream between two blocks to the first of them. A
storage made of parameters alone (gathered ones, casts) is a `weight`; one that the documents of the
batch hold is `batch`; neither depends on which layer came first. Storages that existed before
aren't counted.

Tensors may be real or fake. A block's backward is the time from the gradient of its result to that
of its argument; operators inside a saved-tensor hook meanwhile ran before: they are `replayed`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from checkpointing.tracing.operators import (
    ALLOCATORS,
    Kind,
    kind_of,
    storages_of,
    tensors_in,
    wraps,
)
from megacpp.model.documents import Documents

Phase = Literal["forward", "backward", "replayed"]
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(eq=False, slots=True)
class Allocation:
    """Storage with its maker, its size, and the operators at which it was allocated and freed.

    Attributes:
        part: `embed`, `blocks.3`, `norm`, `head`, or empty outside of all of them.
        path: module below the part whose forward made it.
        operator: that made it or, of memory without values, that first wrote into it.
        shape, dtype: of the first tensor in it; `bytes` of all of it.
        allocated_at, freed_at: number of the operator; `freed_at` is None while it is alive.
        backward: made in a backward.
        weight: made of parameters alone; None: of nothing yet.
        batch: held by the documents of the batch, for all layers.
        host: in the host's memory.
        gradient: of a parameter, when the meter was left.
    """

    part: str
    path: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    allocated_at: int
    backward: bool
    weight: bool | None
    freed_at: int | None = None
    batch: bool = False
    host: bool = False
    gradient: bool = False


class Meter(TorchDispatchMode):
    """Follows storages that are made inside of the context, for one forward and its backward.

    Args:
        model: its parts and modules name the allocations.
        host: returns the buffers that lie in the host's memory when the forward has ended.
        flops: count them, too; the formulas import Triton where it is installed.
        run: runs an operator with its arguments; otherwise it goes on to the mode below.

    Attributes:
        allocations: every storage, in the order of allocation.
        kept: copies of those that were alive when the forward had ended.
        flops: of matrix products, by part and phase.
        count: operators so far.
        forward_ended: operators of the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        host: Callable[[], Iterable[Tensor]] = tuple,
        flops: bool = True,
        run: Run | None = None,
    ) -> None:
        super().__init__()
        self.model, self.host = model, host
        self._run = run or (lambda func, args, kwargs: func(*args, **kwargs))
        self._formula_of: Callable[[Any], Callable[..., int] | None] = lambda _: None
        if flops:
            from checkpointing.tracing.flops import formula_of

            self._formula_of = formula_of
        self.allocations: list[Allocation] = []
        self.kept: list[Allocation] = []
        self.flops: Counter[tuple[str, Phase]] = Counter()
        self.count = self.forward_ended = self._remembering = 0
        self._events: list[tuple[int, int, Allocation, str]] = []
        self._alive: dict[int, Allocation] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._parameters: dict[int, UntypedStorage] = {}
        self._documents: list[Documents] = []
        self._calls: list[tuple[str, str]] = []  # parts and paths of the modules that run
        self._hooked: set[int] = set()  # modules with forward hooks of their own
        self._back = ""  # the part whose backward runs
        self._replaying = 0
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs as much as an operator

    def __enter__(self) -> Meter:
        for p in self.model.parameters():
            storage = local_part(p).untyped_storage()
            self._parameters[id(storage)] = storage
        # Before and after all other hooks of a module, whose work belongs to the module.
        hooks = [register_module_forward_pre_hook(self._enter_module)]
        # A module without hooks stays one: some take a faster path when they have none.
        hooks.append(register_module_forward_hook(self._leave_plain, always_call=True))
        for module in self.model.modules():
            if module._forward_hooks:
                hooks.append(module.register_forward_hook(self._leave_module, always_call=True))
                self._hooked.add(id(module))
        self._undo = [hook.remove for hook in hooks]
        self._undo += [_replaced(UntypedStorage, "resize_", self._resizing)]
        self._undo += [_replaced(saved_tensors_hooks, "__init__", self._unpacking)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for undo in self._undo:
            undo()
        if not self.forward_ended:
            self._end_forward()
        grads = (local_part(p.grad) for p in self.model.parameters() if p.grad is not None)
        for grad in grads:
            alloc = self._alive.get(id(grad.untyped_storage()))
            if alloc is not None:
                alloc.gradient = True

    def timeline(self) -> list[tuple[int, int]]:
        """Pairs of operator number and bytes alive after it, wherever the bytes change."""
        found: dict[int, int] = {}
        now = 0
        for index, change, *_ in self._events:
            now += change
            found[index] = now
        return list(found.items())

    def alive_by_part(self, backward: bool) -> Iterator[tuple[str, int]]:
        """Yield running part and bytes alive at each change, without weights and their gradients.

        Args:
            backward: changes in the backward instead of those in the forward.
        """
        now = 0
        for index, change, alloc, part in self._events:
            if alloc.weight or alloc.gradient or alloc.batch or alloc.host:
                continue
            now += change
            if (index > self.forward_ended) == backward:
                yield part, now

    def peak(self, backward: bool) -> tuple[int, int]:
        """Operator and bytes of the peak of the forward, or of the backward; (0, 0) without one."""
        inside = [x for x in self.timeline() if (x[0] > self.forward_ended) == backward]
        return max(inside, key=lambda x: x[1], default=(0, 0))

    def alive_at(self, index: int) -> Iterator[tuple[Allocation, int]]:
        """Pairs of every storage that has bytes after operator `index`, and the number of bytes."""
        found: dict[int, list[Any]] = {}
        for when, change, alloc, _ in self._events:
            if when <= index:
                found.setdefault(id(alloc), [alloc, 0])[1] += change
        return ((alloc, size) for alloc, size in found.values() if size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types and any(map(wraps, types)):
            return NotImplemented  # a DTensor turns into local operators first
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind.view:
            return self._run(func, args, kwargs)
        back = in_backward()
        if back and not self.forward_ended:
            self._end_forward()
        out = self._run(func, args, kwargs)
        self.count += 1
        formula = self._formula_of(func)
        if formula is not None:
            phase = "forward" if not back else "replayed" if self._replaying else "backward"
            part = self._back if back else self._where()[0]
            self.flops[part, phase] += formula(*args, **kwargs, out_val=out)
        self._follow(kind, args, kwargs, out, back)
        return out

    # ---- storages -----------------------------------------------------------------------------

    def _follow(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, back: bool
    ) -> None:
        """Note which storages an operator made and which it wrote."""
        inputs = {id(t.untyped_storage()) for t in tensors_in((args, kwargs))}
        written = kind.written(args, kwargs)
        changed = set()
        for t in tensors_in((out, written)):
            storage = t.untyped_storage()
            key = id(storage)
            if key in self._alive:
                if key not in changed:
                    changed.add(key)
                    self._write(self._alive[key], kind, inputs - {key})
            elif key not in inputs:  # else it is older than the meter
                self._on_alloc(storage, t, kind, inputs, back)

    def _on_alloc(
        self, storage: UntypedStorage, t: Tensor, kind: Kind, inputs: set[int], back: bool
    ) -> None:
        part, path = self._where()
        alloc = Allocation(
            part=self._back if back else part,
            path=path,
            operator=kind.name,
            shape=tuple(t.shape),
            dtype=t.dtype,
            bytes=storage.nbytes(),
            allocated_at=self.count,
            backward=back,
            weight=None if kind.allocates else self._of_weights(inputs),
        )
        self.allocations.append(alloc)
        key = id(storage)
        self._alive[key] = alloc
        self._note(alloc, alloc.bytes)
        weakref.finalize(storage, self._on_free, key, alloc)

    def _note(self, alloc: Allocation, change: int) -> None:
        part = self._back if self.forward_ended else self._where()[0]
        self._events.append((self.count, change, alloc, part))

    def _write(self, alloc: Allocation, kind: Kind, others: set[int]) -> None:
        """Note that an operator wrote to a storage; a sum with other than weights is no weight."""
        if alloc.operator in ALLOCATORS:
            alloc.operator = kind.name
        made_of = self._of_weights(others)
        if made_of is not None and alloc.weight is not False:
            alloc.weight = made_of

    def _on_free(self, key: int, alloc: Allocation) -> None:
        if self._alive.get(key) is alloc:
            del self._alive[key]
        alloc.freed_at = self.count
        self._note(alloc, -alloc.bytes)

    def _of_weights(self, storages: set[int]) -> bool | None:
        """Whether all storages are made of parameters; None without storages."""
        if not storages:
            return None
        alive, parameters = self._alive, self._parameters
        return all(alive[key].weight if key in alive else key in parameters for key in storages)

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Follow `resize_`, by which FSDP2 frees and fills storages without an operator."""

        def resize_(storage: UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            alloc = self._alive.get(id(storage))
            if alloc is not None and alloc.bytes != size:
                self._note(alloc, size - alloc.bytes)
                alloc.bytes = size
            return out

        return resize_

    def _end_forward(self) -> None:
        self.forward_ended = self.count
        shared = set(storages_of(self._documents, set()))
        host = {id(t.untyped_storage()) for t in self.host()}
        for key, alloc in [*self._alive.items()]:  # the collector may free some meanwhile
            # An older batch's documents may outlive it: they point at their parts and back.
            alloc.batch, alloc.host = alloc.batch or key in shared, alloc.host or key in host
        # As they are now: a storage may be emptied later.
        alive = [*self._alive.values()]
        self.kept = [dataclasses.replace(alloc) for alloc in alive if alloc.bytes]
        self._documents.clear()

    # ---- where and when -----------------------------------------------------------------------

    def _where(self) -> tuple[str, str]:
        return self._calls[-1] if self._calls else ("", "")

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        part, path = _split(name)
        running = self._where()[0]
        # A part may call another, whose work is then its own: tokens further ahead are looked up.
        self._calls.append((running, name) if running not in ("", part) else (part, path))
        if self._calls[-1][1]:  # below a part: FSDP2 has gathered its parameters by now
            for p in module.parameters():
                storage = local_part(p).untyped_storage()
                self._parameters[id(storage)] = storage
        if not self.forward_ended:
            self._documents += [a for a in args if isinstance(a, Documents)]

    def _leave_plain(self, module: nn.Module, args: Any, out: Any) -> None:
        if id(module) in self._names and id(module) not in self._hooked:
            self._leave_module(module, args, out)

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        part, path = self._calls.pop()
        if part and not path and not in_backward():
            for t in tensors_in((vars(out) if dataclasses.is_dataclass(out) else out,)):
                if t.requires_grad:
                    t.register_hook(partial(self._enter_backward, part))

    def _enter_backward(self, part: str, grad: Tensor) -> None:
        self._back = part

    def _remembered(self, memo: Callable[..., Any]) -> Callable[..., Any]:
        """Note the allocations that documents memoize: the first layer that asks makes them."""

        def watched(docs: Documents, key: Hashable, make: Callable[[], Any]) -> Any:
            def made() -> Any:
                self._remembering += 1
                try:
                    return make()
                finally:
                    self._remembering -= 1

            return memo(docs, key, made)

        return watched

    def _unpacking(self, init: Callable[..., None]) -> Callable[..., None]:
        """Count operators that unpack a saved tensor as replayed; note what is packed as kept."""

        def watched(
            hooks: Any, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
        ) -> None:
            def replayed(held: Any) -> Tensor:
                self._replaying += 1
                try:
                    return unpack(held)
                finally:
                    self._replaying -= 1

            def kept(t: Tensor) -> Any:
                held = pack(t)
                self._keeps(held)
                return held

            init(hooks, kept, replayed)

        return watched

    def _keeps(self, held: Any) -> None:
        """Note what was packed for the backward: a tensor, or what will bring one back."""


def in_backward() -> bool:
    """Return whether the autograd engine is running a backward."""
    return torch._C._current_graph_task_id() != -1


def local_part(t: Tensor) -> Tensor:
    """Return the tensor that this process stores of `t`, of its local shape `[...]`.

    torchao wraps the tensors that FSDP2 gathers in FP8; the wrapper is taken off.
    """
    own = getattr(t, "_local_tensor", t)
    return getattr(own, "_tensor", own)


def part_of(name: str) -> str:
    """Return the part of the model (`blocks.3`, `head`) that a module or parameter belongs to."""
    return _split(name)[0]


def _split(name: str) -> tuple[str, str]:
    """Return the part and the path of the module below it; both empty for the whole model."""
    words = name.split(".")
    own = 2 if words[0] == "blocks" else 1
    part = ".".join(words[:own])
    return ("", "") if part == "blocks" else (part, ".".join(words[own:]))


def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a method by `around(original)`; return the function that restores it."""
    own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, around(original))
    return partial(setattr, owner, name, original) if own else partial(delattr, owner, name)
