"""Record of a training step's allocations: parameters, gradients, state, activations, buffers.

    with Recorder(model) as recorder:   # before anything has memory
        model.to_empty(device="cpu")
        optimizer = ...
        step()                          # FSDP2 makes things that stay when it first runs
        recorder.begin(optimizer)
        step()
    recorder.stream()                   # megacpp/memory/stream.py

(Activation memory, and all the rest.) It follows storages as the meter does
(checkpointing/tracing/meter.py) and says of each which component it is of
(megacpp/memory/components.py). What FSDP2 does for a unit belongs to the part of the model whose
parameters the unit has, whichever part runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from checkpointing.tracing.meter import (
    Allocation,
    Meter,
    _replaced,
    in_backward,
    local_part,
    part_of,
)
from checkpointing.tracing.operators import storages_of
from megacpp.memory.stream import Stream, StreamBlock
from megacpp.model.documents import Documents
from megacpp.model.pattern import ENTRANCE, EXIT


class Recorder(Meter):
    """Meter of a whole step; `begin` drops the times of storages that exist already.

    Attributes:
        components: of allocations, by identity; others follow from the time of allocation.
        first_alone: blocks of the stream that the first layer of a kind makes for all others.
    """

    def __init__(self, model: nn.Module, host: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__(model, host)
        self.components: dict[int, str] = {}
        self._modules = set(self._names.values())
        self._kept: set[int] = set()
        self._marks: list[tuple[int, str]] = []
        self._first = 0
        self._stage = ""  # a part of the step that is no forward and no backward
        self._unit = ""  # the part whose unit FSDP2 is working for
        self._of_unit: dict[int, str] = {}
        self._blind = False
        self._computes = torch.cpu.current_stream()
        self._streams: dict[int, int] = {}  # others, numbered as they come
        self._stream_of: dict[int, int] = {}
        self._first_alone: set[int] = set()
        self.first_alone: set[int] = set()

    def __enter__(self) -> Recorder:
        super().__enter__()
        if torch.distributed.is_available():
            self._undo += [*_watched_units(self), _blind_to_layouts(self)]
        self._undo.append(_replaced(Documents, "memo", self._remembered))
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._blind:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    # ---- what runs ----------------------------------------------------------------------------

    def begin(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Start the recorded step here; name gradients, parameters and optimizer state so far."""
        self._first = len(self._events)
        self._marks.clear()
        self.name_resting(optimizer)

    def name_resting(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Name parameters, buffers, and the optimizer's state as far as it exists."""
        state = optimizer.state if optimizer is not None else {}
        parameters = list(self.model.named_parameters())
        resting = [("optimizer_state", name, state.get(p)) for name, p in parameters]
        resting += [("parameters", *named) for named in parameters]
        resting += [("parameters", *named) for named in self.model.named_buffers()]
        resting.append(("optimizer_state", "", list(state.values())))  # and state of no parameter
        seen: set[int] = set()
        for component, name, found in resting:
            for key in storages_of(_locals(found), set()):
                alloc = self._alive.get(key)
                if alloc is None or key in seen:
                    continue
                seen.add(key)
                self._name(key, component)
                alloc.part = part_of(name)
                if component == "parameters":
                    alloc.weight = True  # so are the casts that autocast makes of them

    def on_host(self, t: Tensor) -> Tensor:
        """Return a tensor of any shape, whose memory is from now on the host's."""
        self._alive[id(t.untyped_storage())].host = True
        return t

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Mark a stage of the step outside of forward and backward: `clip`, `optimizer`, ..."""
        self._stage, before = name, self._stage
        self.mark(name)
        if name == "clip":
            self.note_gradients()
        yield
        self._stage = before
        if name == "backward":
            self.note_gradients()

    def mark(self, name: str) -> None:
        """Note that the next events belong to `name`; the same name again adds no mark."""
        if not self._marks or self._marks[-1][1] != name:
            self._marks.append((len(self._events), name))

    def note_gradients(self) -> None:
        """Name the gradients that parameters have now."""
        for p in self.model.parameters():
            if p.grad is not None:
                self._name(id(local_part(p.grad).untyped_storage()), "gradients")

    def stream(self) -> Stream:
        """Blocks and events of the step, those that existed before it first."""
        found = Stream()
        numbers: dict[int, int] = {}
        marks = [(max(0, index - self._first), name) for index, name in self._marks]
        base: dict[int, list[Any]] = {}
        for _, change, alloc, _ in self._events[: self._first]:
            base.setdefault(id(alloc), [alloc, 0])[1] += change
        for alloc, size in base.values():
            if size > 0 and not alloc.host:
                numbers[id(alloc)] = found.allocate(self._block(alloc, size))
        ahead = len(found.events)
        places = [0]
        for _, change, alloc, _ in self._events[self._first :]:
            if change > 0 and not alloc.host:
                number = numbers[id(alloc)] = found.allocate(self._block(alloc, change))
                if id(alloc) in self._first_alone:
                    self.first_alone.add(number)
            elif change < 0 and id(alloc) in numbers:
                found.free(numbers.pop(id(alloc)))
            places.append(len(found.events) - ahead)
        found.marks = [(ahead + places[min(i, len(places) - 1)], name) for i, name in marks]
        return found

    # ---- whose it is --------------------------------------------------------------------------

    def _block(self, alloc: Allocation, size: int) -> StreamBlock:
        shape = "x".join(map(str, alloc.shape)) or "()"
        name = f"{alloc.operator} {shape} {str(alloc.dtype).removeprefix('torch.')}"
        part = self._of_unit.get(id(alloc), alloc.part)
        return StreamBlock(
            size,
            self._component(alloc),
            part,
            f"{alloc.path}: {name}" if alloc.path else name,
            self._stream_of.get(id(alloc), 0),
        )

    def _component(self, alloc: Allocation) -> str:
        if (named := self.components.get(id(alloc))) is not None:
            return named
        if alloc.batch:
            return "batch"
        if id(alloc) in self._of_unit or alloc.weight:
            return "communication"
        if self._is_kept(alloc):
            if alloc.part in (*ENTRANCE, *EXIT):
                return "head_loss"
            return "moe_routing" if self._routes(alloc) else "activations"
        return "workspace"

    def _is_kept(self, alloc: Allocation) -> bool:
        """For the backward, as the end of the forward showed."""
        return id(alloc) in self._kept

    def _routes(self, alloc: Allocation) -> bool:
        """Made by the router of an E block, or on the way of rows to its experts and back."""
        if f"{alloc.part}.mixer.router" not in self._modules:
            return False
        weights = alloc.path == "mixer.experts" and len(alloc.shape) == 1  # of rows in their slots
        return weights or alloc.path == "mixer" or alloc.path.startswith("mixer.router")

    def _name(self, storage: int, component: str) -> None:
        alloc = self._alive.get(storage)
        if alloc is not None:
            self.components[id(alloc)] = component

    def _counts(self, t: Tensor) -> bool:
        """Return whether a tensor is a step's; examples for stages, kept by torch 2.11, aren't."""
        return t.device.type != "meta"

    def _on_alloc(self, storage: UntypedStorage, t: Tensor, *rest: Any) -> None:
        if not self._counts(t):
            return
        super()._on_alloc(storage, t, *rest)
        alloc = self.allocations[-1]
        if (stream := torch.cpu.current_stream()) is not self._computes:
            self._stream_of[id(alloc)] = self._streams.setdefault(
                id(stream), len(self._streams) + 1
            )
        if self._unit:
            self._of_unit[id(alloc)] = self._unit
        if self._remembering:
            self._first_alone.add(id(alloc))
        if self._stage in ("clip", "optimizer"):
            self.components[id(alloc)] = "muon_transient"
        elif self._stage == "batch":
            self.components[id(alloc)] = "batch"

    def _end_forward(self) -> None:
        super()._end_forward()
        self._kept |= {id(alloc) for alloc in [*self._alive.values()] if not alloc.backward}

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        super()._enter_module(module, args)
        name = self._names.get(id(module))
        if name is None or in_backward():
            return
        if not name or self._where() == (name, ""):
            self.forward_ended = 0  # another microbatch, or one that a pipeline's stage begins
            self._back = ""
        if name and self._where() == (name, ""):
            self.mark(f"forward {name}")

    def _enter_backward(self, part: str, grad: Tensor) -> None:
        super()._enter_backward(part, grad)
        self.mark(f"backward {part}")


def _locals(found: Any) -> Any:
    if isinstance(found, Tensor):
        return local_part(found)
    if isinstance(found, dict):
        return [_locals(v) for v in found.values()]
    if isinstance(found, list | tuple):
        return [_locals(v) for v in found]
    return found


def _watched_units(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Attribute allocations of FSDP2 to their unit; yield functions that undo the patches."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as Group

    parts: dict[int, str] = {}
    names = {id(m): n for n, m in recorder.model.named_modules()}

    def part(group: Any) -> str:
        if id(group) not in parts:
            found = [names.get(id(m), "") for m in group.modules]
            parts[id(group)] = part_of(found[0]) or "root"
        return parts[id(group)]

    def gradients(group: Any) -> None:
        for p in group.fsdp_params:
            for grad in (
                getattr(getattr(p, "_unsharded_param", None), "grad", None),
                p.unsharded_accumulated_grad,
                p.sharded_param.grad,
            ):
                if grad is not None:
                    recorder._name(id(local_part(local_part(grad)).untyped_storage()), "gradients")

    def reduces(method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        """Mark the reductions that a pipeline's schedule runs for all units at a step's end."""
        if not in_backward() and recorder._back != "embed":
            recorder.mark("reduce")
        return around(method, group, *args, **kwargs)

    def around(method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        before, recorder._unit = recorder._unit, part(group)
        gradients(group)
        try:
            return method(group, *args, **kwargs)
        finally:
            gradients(group)
            recorder._unit = before

    def begins(method: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        """Mark a block's backward where its unit gathers, or prefetches for the block before it."""
        own = part(group)
        if own.startswith(("blocks.", "mtp")) and any(
            names.get(id(m)) == own for m in group.modules
        ):
            recorder.mark(f"backward {own}")
        return method(group, *args, **kwargs)

    instead = dict.fromkeys(("unshard", "wait_for_unshard", "reshard"), around)
    instead |= {"post_backward": reduces, "finalize_backward": around, "pre_backward": begins}
    for name, wrapper in instead.items():
        original = getattr(Group, name)

        def watched(group: Any, *args: Any, _of: Any = (wrapper, original), **kwargs: Any) -> Any:
            return _of[0](_of[1], group, *args, **kwargs)

        setattr(Group, name, watched)
        yield partial(setattr, Group, name, original)


def _blind_to_layouts(recorder: Recorder) -> Callable[[], None]:
    """Ignore the fake tensors of whole shapes that DTensor runs operators on: no rank has them."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator as Propagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(Propagator, name)

    def unseen(*args: Any, **kwargs: Any) -> Any:
        before, recorder._blind = recorder._blind, True
        try:
            return original(*args, **kwargs)
        finally:
            recorder._blind = before

    setattr(Propagator, name, unseen)
    return partial(setattr, Propagator, name, original)
