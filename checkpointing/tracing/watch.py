"""Record of one step of a running trainer: storages that existed before, and all allocations.

    watch = StepWatch(model, optimizer)
    with watch:
        step()
    watch.stream()      # megacpp/memory/stream.py, as a trace of that step gives it

(Activation memory, and all the rest.) The recorder starts with an empty model; this one is for the
middle of a run. It takes in what rests (parameters, gradients, state, and the storages that FSDP2
empties and fills), and finds the optimizer's part of the step by its hooks. It changes no value.
A forward that has not ended, as one that ran out of memory, is told apart too: what is kept is
noted when autograd or a recompute region puts it away.
It counts the memory of the model's device: beside a GPU what waits on the host isn't counted.
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
from torch.autograd.graph import saved_tensors_hooks

from checkpointing.recompute import Forward, _Argument
from checkpointing.tracing.meter import Allocation, _replaced, local_part, part_of
from checkpointing.tracing.operators import storages_of, tensors_in
from checkpointing.tracing.recorder import Recorder
from megacpp.memory.stream import Stream

ROUTED = ("mixer.dispatch", "mixer.experts", "mixer.combine")


class StepWatch(Recorder):
    """Recorder of one step that begins when the context is entered."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model)
        self.optimizer = optimizer
        self._device = next((local_part(p).device.type for p in model.parameters()), "cpu")
        self._ends: list[ref[UntypedStorage]] = []
        self._saved: set[int] = set()  # allocations of which something was packed
        # Made before the meter watches such hooks: these see what no others do.
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> StepWatch:
        for component, part, t in resting(self.model, self.optimizer):
            self._adopt(component, part, t)
        super().__enter__()
        hooks: list[Callable[[], None]] = [
            self.optimizer.register_step_pre_hook(self._into_optimizer).remove,
            self.optimizer.register_step_post_hook(self._out_of_optimizer).remove,
        ]
        self._undo += [*hooks, _replaced(_Argument, "capture", self._capturing)]
        self._hooks.__enter__()
        self.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(None, None, None)
        super().__exit__(*error)

    def stream(self) -> Stream:
        """Blocks and events from the beginning of the watch until now."""
        self.note_gradients()
        if not self.forward_ended:
            shared = set(storages_of(self._documents, set()))
            for key, life in [*self._alive.items()]:
                life.batch = life.batch or key in shared
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

    def _counts(self, t: Tensor) -> bool:
        return t.device.type == self._device

    def _is_kept(self, alloc: Allocation) -> bool:
        """Return whether an allocation is kept for the backward.

        While a forward runs these are packed ones, what finished parts have left alive, and rows on
        their way through experts.
        """
        past = self.forward_ended or alloc.backward or alloc.freed_at is not None
        if past or super()._is_kept(alloc):
            return super()._is_kept(alloc)
        runs = self._marks[-1][1].removeprefix("forward ") if self._marks else ""
        # Rows and hidden units of the experts that run: put away a few operators later.
        routed = alloc.path.startswith(ROUTED) and f"{alloc.part}.mixer.router" in self._modules
        return alloc.part not in ("", runs) or routed or id(alloc) in self._saved

    def _pack(self, t: Tensor) -> Tensor:
        self._keeps(t)
        return t

    def _keeps(self, held: Any) -> None:
        if not isinstance(held, Tensor) or self.forward_ended:
            return
        for t in stored_tensors(held):
            alloc = self._alive.get(id(t.untyped_storage()))
            if alloc is not None:
                self._saved.add(id(alloc))

    def _capturing(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """Arguments of a piece that runs again are kept without autograd."""

        def captured(arg: object, forward: Forward) -> Any:
            found = capture(arg, forward)
            self._keeps(found.kept)
            return found

        return captured

    def _end(self, key: int, alloc: Allocation, _: object) -> None:
        self._on_free(key, alloc)

    def _into_optimizer(self, *_: Any) -> None:
        self.note_gradients()
        self._stage = "optimizer"
        self.mark("optimizer")

    def _out_of_optimizer(self, *_: Any) -> None:
        self._stage = ""


def _unpack(t: Tensor) -> Tensor:
    return t


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
