"""Record of a forward and backward of a few parts, for megacpp/memory/block_trace.py.

    with BlockMeter(model, ["blocks.0"]) as meter:
        meter.run(lambda x_BTD: model.blocks["0"](x_BTD, docs), x_BTD, nullcontext())
    meter.trace()

(Activation memory.) The gradient of the output is allocated when the backward begins, and the
gradient of the input is freed at once: in a step, the neighbouring blocks allocate and free them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from checkpointing.tracing.graph_run import WITH_ANOTHER
from checkpointing.tracing.host_ledger import HostLedger
from checkpointing.tracing.meter import Allocation, Meter, Run, _replaced, local_part
from checkpointing.tracing.operators import ALLOCATORS, NO_KERNEL, Kind, tensors_in
from megacpp.memory.block_trace import BlockTrace, PassWork, Role, kernel_bytes, timed_apart
from megacpp.memory.repeats import repeats
from megacpp.model.documents import Documents
from megacpp.model.head import LossSum

WRITERS = ("copy_", "fill_", "zero_")  # read nothing of what they write over


class BlockMeter(Meter):
    """Meter of parts of a model, from their input's arrival to their input's gradient.

    Args:
        model: whose parts run.
        parts: names of the parts, in the order in which they run.
        ledger: counts tensors that wait on the host; None: offload is off.
        run: see `Meter`.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[str],
        ledger: HostLedger | None = None,
        run: Run | None = None,
    ) -> None:
        super().__init__(model, tuple if ledger is None else ledger.buffers, flops=False, run=run)
        self._ledger = ledger
        self._input: Allocation | None = None  # the input's copy on the host
        self._places = {name: place for place, name in enumerate(parts)}
        self._events_of_parts = self._events_of_forward = self._events_of_inputs = 0
        self._added: dict[int, int] = {}  # event by which a gradient is its parameter's
        self._gradients: set[int] = set()
        self._shared: set[int] = set()  # made for all layers of the batch
        self._start = 0  # the number that the backward starts from
        self._result: Allocation | None = None
        # Operators, their bytes, and launches, forward and backward.
        self._ran = ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
        self._times: dict[int, float] = {}  # of an allocation that stands for others
        self._in_place = ([0.0, 0.0], [0.0, 0.0])  # kernels that work in place, and their bytes

    def __enter__(self) -> BlockMeter:
        super().__enter__()
        self._undo.append(_replaced(Documents, "memo", self._remembered))
        if "triton" in sys.modules:
            from triton.runtime.jit import KernelInterface

            of = lambda kernel, grid: self._launch  # noqa: E731
            self._undo.append(_replaced(KernelInterface, "__getitem__", lambda _: of))
        for p in self.model.parameters():
            if p.requires_grad:
                self._undo.append(p.register_post_accumulate_grad_hook(self._sum).remove)
        return self

    def _follow(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, back: bool
    ) -> None:
        """Count the operator and its bytes; then see `Meter._follow`."""
        if not self._remembering:
            ran, in_place, times = self._ran[back], self._in_place[back], repeats()
            ran[0] += times
            ran[2] += times * (kind.name not in NO_KERNEL and not WITH_ANOTHER.get())
            if not timed_apart(kind.name):
                ran[1] += times * sum(t.nbytes for t in tensors_in((args, kwargs, out)))
            if kind.writes and (changed := [*self._changed(kind, args, kwargs)]):
                in_place[0] += max(times for _, times in changed)
                in_place[1] += sum(
                    times * kernel_bytes(kind.name, t.nbytes) for t, times in changed
                )
        super()._follow(kind, args, kwargs, out, back)

    def _launch(self, *_: Any, **__: Any) -> None:
        """Count a Triton kernel in place of its launch."""
        if not self._remembering:
            self._ran[self.forward_ended > 0][2] += repeats()

    def _changed(
        self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Tensor, float]]:
        """Yield the tensors of tokens that an element-wise operator reads and writes in place.

        With each is how often. The first that writes to empty memory counts as its allocation.
        """
        if timed_apart(kind.name) or kind.name in WRITERS:
            return
        for t in tensors_in(kind.written(args, kwargs)):
            alloc = self._alive.get(id(t.untyped_storage()))
            if alloc is not None and not alloc.weight:
                empty = alloc.operator in ALLOCATORS
                yield t, repeats() - empty * self._times.get(id(alloc), 1.0)

    def run(
        self,
        parts: Callable[[Tensor], Tensor | LossSum],
        x_BTD: Tensor,
        autocast: AbstractContextManager[object],
        split: bool = False,
    ) -> None:
        """Run forward and backward.

        Args:
            parts: runs the forward of all parts.
            x_BTD: input `[B, T, D]`, a leaf; without any gradient there is no backward.
            autocast: under which the forward runs.
            split: walk for gradients of inputs, then of weights, as pipelines of torch do.
        """
        with autocast:
            out = parts(_Begin.apply(x_BTD))  # type: ignore[arg-type]
            self._events_of_parts = len(self._events)
        ran = [*self._ran[False]]
        if isinstance(out, LossSum):
            end = out.loss_sum
        else:
            self._result = self._alive.get(id(out.untyped_storage()))
            end = _End.apply(out)
            self._start = id(self.allocations[-1])
        self._end_forward()
        if self._ledger is not None and (copy := self._ledger.buffer_of(x_BTD)) is not None:
            self._input = self._alive.get(id(copy.untyped_storage()))
        self._events_of_forward = len(self._events)
        del out  # the next block's, as far as this one doesn't keep it
        if split:
            self._walk_twice(end, x_BTD)  # type: ignore[arg-type]
        elif end.requires_grad:  # type: ignore[union-attr]
            end.backward()  # type: ignore[union-attr]
        self._ran[False][:] = ran  # without the end and its first gradient

    def _walk_twice(self, end: Tensor, x_BTD: Tensor) -> None:
        from torch.distributed.pipelining import _backward

        weights = [p for p in self.model.parameters() if p.requires_grad]
        _, groups = _backward.stage_backward_input([end], None, [x_BTD], iter(weights))
        self._events_of_inputs = len(self._events)
        _backward.stage_backward_weight(iter(weights), groups)
        for p in weights:
            self._sum(p)

    def trace(self) -> BlockTrace:
        """Return the allocations and frees so far."""
        numbers: dict[int, int] = {}
        allocations: list[Allocation] = []
        events: list[int] = []
        places = [0]
        marks, running = list[tuple[int, int]](), 0
        for _, change, alloc, part in self._events:
            if self._places.get(part, running) != running:  # else of no part, as sums of losses are
                running = self._places[part]
                marks.append((len(events), running))
            if id(alloc) != self._start:
                if change > 0:
                    numbers[id(alloc)] = len(allocations)
                    allocations.append(alloc)
                if id(alloc) in numbers:
                    events.append((numbers[id(alloc)] + 1) * (1 if change > 0 else -1))
            places.append(len(events))
        forward, weights = places[self._events_of_forward], places[self._events_of_inputs]
        ended = places[self._events_of_parts]
        ends = [0, ended, forward, *([weights] if weights else []), len(events)]
        roles: list[Role] = [self._role(alloc) for alloc in allocations]
        first, second = (
            self._work(back, [(allocations[n - 1], roles[n - 1]) for n in walk if n > 0])
            for back, walk in ((False, events[:forward]), (True, events[forward:]))
        )
        return BlockTrace(
            tuple(alloc.bytes for alloc in allocations),
            tuple(
                sys.intern(f"{x.path or (x.part and 'block')}: {x.operator}") for x in allocations
            ),
            "".join(roles),
            tuple(event for a, b in pairwise(ends) for event in _in_order(events[a:b])),
            forward,
            {numbers[key]: places[at] for key, at in self._added.items() if key in numbers},
            tuple(dict(marks).items()),
            weights=weights,
            ended=ended,
            work=(first, second),
        )

    def _work(self, back: bool, made: list[tuple[Allocation, Role]]) -> PassWork:
        """Return the work of the forward or the backward, which made these allocations."""
        kernels, moved = self._in_place[back]
        for alloc, role in made:
            if role not in "bw" and not timed_apart(alloc.operator):
                times = self._times.get(id(alloc), 1.0)
                kernels += times
                moved += times * kernel_bytes(alloc.operator, alloc.bytes)
        return PassWork(*map(round, (*self._ran[back], kernels, moved)))

    def _role(self, alloc: Allocation) -> Role:
        if id(alloc) in self._gradients:
            return "g"
        if alloc is self._result:
            return "o"
        if alloc.host:
            return "i" if alloc is self._input else "h"
        if alloc.batch or id(alloc) in self._shared:
            return "b"
        return "w" if alloc.weight else "t"

    def _sum(self, p: nn.Parameter) -> None:
        if p.grad is None:
            return  # of a part that doesn't run
        alloc = self._alive.get(id(local_part(p.grad).untyped_storage()))
        if alloc is not None:
            self._gradients.add(id(alloc))
            self._added[id(alloc)] = len(self._events)

    def _on_alloc(self, *args: Any) -> None:
        super()._on_alloc(*args)
        if repeats() != 1:
            self._times[id(self.allocations[-1])] = repeats()
        if self._remembering:
            self._shared.add(id(self.allocations[-1]))


def _in_order(events: list[int]) -> Iterator[int]:
    """Yield events with those that free one after the other in a fixed order.

    What autocast remembers is freed in the order of its addresses, another one in every run.
    """
    for frees, run in groupby(events, key=lambda event: event < 0):
        found = list(run)
        yield from sorted(found) if frees else found


def as_unit(module: nn.Module) -> None:
    """Put FSDP2's node of autograd in front of a module, which decides where gradients are summed.

    The node holds no gradient, so those of two readers may be added in place. It makes zeros of
    gradients that don't come. When it runs, the module's weights have theirs, which are reduced.
    """

    def through(_: nn.Module, args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        if not places:
            return args
        passed = _Unit.apply(module, *(leaves[i] for i in places))
        for i, x in zip(places, passed, strict=True):  # type: ignore[arg-type]
            leaves[i] = x
        return pytree.tree_unflatten(leaves, spec)

    module.register_forward_pre_hook(through, prepend=True)  # as FSDP2: before layouts of tp


class _Unit(torch.autograd.Function):
    """Stand-in for `RegisterPostBackwardFunction` of FSDP2."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.module = module
        return inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for p in ctx.module.parameters():
            p.grad = None
        return None, *grads


class _Begin(torch.autograd.Function):
    """Stand-in for the block in front: it takes the gradient, which is then free."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor) -> Tensor:
        return x_BTD.detach()  # no view of a leaf, which offload would take for a parameter

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class _End(torch.autograd.Function):
    """Stand-in for the block behind: it allocates the gradient when its own backward is done."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor) -> Tensor:
        ctx.like = x_BTD.shape, x_BTD.dtype, x_BTD.device
        return x_BTD.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)
