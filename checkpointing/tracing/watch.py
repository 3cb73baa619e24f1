"""Record of one step of a running trainer: storages that existed before, and all allocations.

    watch = StepWatch(model, optimizer)
    with watch:
        step()
    watch.stream()      # megacpp/memory/stream.py, as a trace of that step gives it

(Activation memory, and all the rest.) The recorder starts with an empty model; this one is for the
middle of a run. It adopts resting storages (parameters, gradients, optimizer state, and those that
FSDP2 empties and fills), and finds the optimizer's part of the step by its hooks. It changes no
value. It counts the memory of the model's device: beside a GPU the host's memory isn't counted.
Cost: one Python call an operator, about half a step of a small model on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from checkpointing.tracing.meter import Allocation, local_part, part_of
from checkpointing.tracing.operators import tensors_in
from checkpointing.tracing.recorder import Recorder
from megacpp.memory.stream import Stream


class StepWatch(Recorder):
    """Recorder of one step that begins when the context is entered."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model)
        self.optimizer = optimizer
        self._device = next((local_part(p).device.type for p in model.parameters()), "cpu")
        self._ends: list[ref[UntypedStorage]] = []

    def __enter__(self) -> StepWatch:
        for component, part, t in resting(self.model, self.optimizer):
            self._adopt(component, part, t)
        super().__enter__()
        hooks: list[Callable[[], None]] = [
            self.optimizer.register_step_pre_hook(self._into_optimizer).remove,
            self.optimizer.register_step_post_hook(self._out_of_optimizer).remove,
        ]
        self._undo += hooks
        self.begin()
        return self

    def stream(self) -> Stream:
        """Blocks and events from the beginning of the watch until now."""
        self.note_gradients()
        return super().stream()

    def rest(self) -> dict[str, int]:
        """Bytes that outlive a step, by component, as they are now; nothing is recorded."""
        found: Counter[str] = Counter()
        seen: set[int] = set()
        for component, _, t in resting(self.model, self.optimizer):
            storage = t.untyped_storage()
            if t.device.type != self._device:
                continue
            if storage.data_ptr() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[component] += storage.nbytes()
        return dict(found)

    def _adopt(self, component: str, part: str, t: Tensor) -> None:
        """Add a storage that is older than the watch."""
        storage = t.untyped_storage()
        if id(storage) in self._alive or t.device.type != self._device:
            return
        weight = component in ("parameters", "communication")
        alloc = Allocation(
            part, "", "", tuple(t.shape), t.dtype, storage.nbytes(), 0, False, weight
        )
        self.allocations.append(alloc)
        self._alive[id(storage)] = alloc
        self._note(alloc, alloc.bytes)
        # Not `finalize`: parameters outlive the watch, and would keep it alive.
        self._ends.append(ref(storage, partial(self._end, id(storage), alloc)))
        self._name(id(storage), component)

    def _on_alloc(self, storage: UntypedStorage, t: Tensor, *rest: Any) -> None:
        if t.device.type == self._device:
            super()._on_alloc(storage, t, *rest)

    def _end(self, key: int, alloc: Allocation, _: object) -> None:
        self._on_free(key, alloc)

    def _into_optimizer(self, *_: Any) -> None:
        self.note_gradients()
        self._stage = "optimizer"
        self.mark("optimizer")

    def _out_of_optimizer(self, *_: Any) -> None:
        self._stage = ""


def resting(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield component, part and local tensor of everything that outlives a step."""
    for name, p in model.named_parameters():
        for t in stored_tensors(p):
            yield "parameters", part_of(name), t
        if p.grad is not None:
            yield from (("gradients", part_of(name), t) for t in stored_tensors(p.grad))
    for name, buffer in model.named_buffers():
        yield "parameters", part_of(name), local_part(buffer)
    for state in optimizer.state.values():
        for t in tensors_in(state):
            yield from (("optimizer_state", "", x) for x in stored_tensors(t))
    for name, module in model.named_modules():
        yield from (("communication", part_of(name), t) for t in _gathered(module))


def stored_tensors(t: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that this process stores of `t` `[...]`: shards, packed moments."""
    local = local_part(t)
    names = getattr(local, "__tensor_flatten__", None)
    if names is None or type(local) in (Tensor, nn.Parameter):
        yield local
        return
    for name in names()[0]:
        yield from stored_tensors(getattr(local, name))


def _gathered(module: nn.Module) -> Iterator[Tensor]:
    """Storages that FSDP2 fills with gathered parameters and empties again."""
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return
    found = state()
    groups = getattr(found, "_fsdp_param_groups", None)  # torch before 2.12 has one at most
    for group in [found._fsdp_param_group] if groups is None else groups:
        if group is None:
            continue
        for p in group.fsdp_params:
            yield from p.all_gather_outputs
