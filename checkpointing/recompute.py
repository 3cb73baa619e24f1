"""Recomputation that also drops results: regions of a forward that the backward runs again.

torch.utils.checkpoint drops what autograd saves *inside* a function but keeps what the function
returns, because the operator behind it saves that. For a norm, a projection or a rotation the
result is all there is to save. Here results are dropped too:

    x -- region 1 -- a -- region 2 -- b -- kept operator      saved: x
                                                              dropped: a, b, all that is inside

While a block's forward runs, every tensor that autograd saves passes `Forward.pack`. A tensor that
lies in the storage of a region's result, or that is saved inside a region, becomes a handle. The
first handle that the backward resolves runs its region again from the region's arguments; an
argument that is another region's result is a handle itself, so a chain goes back to saved tensors.

(Megatron-LM's `CheckpointWithoutOutput` has the same aim; it empties storages and fills them again
from a gradient hook. Saved-tensor hooks leave tensors unchanged.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from checkpointing.rng_and_autocast import RngAndAutocastState
from megacpp.model.regions import Region

R = TypeVar("R")
Check = Literal["default", "none"]


class Waiting(Protocol):
    """Handle of a tensor that is stored elsewhere."""

    def get(self) -> Tensor:
        """Return the tensor on its device."""
        ...


Store = Callable[[Tensor], "Tensor | Waiting"]


def stay(t: Tensor) -> Tensor:
    """Return the tensor itself: the `Store` that moves nothing.

    Args:
        t: any shape.
    """
    return t


class RecomputeError(RuntimeError):
    """Error of a region whose recomputation differed from its first run."""


@dataclass
class Replays:
    """Number of recomputations per region; `running` during one; regions that drew numbers."""

    counts: dict[str, int] = field(default_factory=dict)
    drawing: set[str] = field(default_factory=set)
    running: bool = False


class BlockRecompute:
    """Calls of the recompute regions of one block; assigned to the block and all its modules.

    Args:
        regions: recomputed regions; with "block" the whole block is, and the others are inside it.
        replays: counts for the whole model.
        store: where saved tensors are kept until the backward.
        everything: store all saved tensors, not only arguments of regions.
        check: "none" accepts tensors of another shape from a recomputation.
        before, after: handoff of streams from the block in front, and to the next block.
    """

    def __init__(
        self,
        regions: frozenset[Region],
        replays: Replays,
        store: Store = stay,
        everything: bool = False,
        check: Check = "default",
        before: StreamHandoff | None = None,
        after: StreamHandoff | None = None,
    ) -> None:
        self.regions, self.replays, self.store = regions, replays, store
        self.everything, self.check = everything, check
        self.before, self.after = before, after
        self.forward: Forward | None = None  # of the block, while it runs
        self.call: _RegionCall | None = None  # which runs now, for the first time or again

    def __call__(self, region: Region, fn: Callable[..., R], *args: object) -> R:
        """Run a region; drop its results if the policy recomputes it."""
        whole = region == "connected" or (region == "block" and self.forward is None)
        if whole and self.call is None and torch.is_grad_enabled():
            return self._block(region, fn, args)
        if self.forward is None or self.call is not None or region not in self.regions:
            return fn(*args)
        return self.forward.run(region, fn, args)

    def keep(self, fn: Callable[..., R], *args: object) -> R:
        """Return a decision; inside a region the first run's decision is remembered."""
        return fn(*args) if self.call is None else self.call.decide(fn, args)

    def _block(self, region: Region, fn: Callable[..., R], args: tuple[object, ...]) -> R:
        forward = self.forward = Forward(self)
        if self.before is not None:
            forward.take(self.before)
        try:
            with saved_tensors_hooks(forward.pack, unpack):
                result = forward.run(region, fn, args) if region in self.regions else fn(*args)
            if self.after is not None:
                forward.leave(result, self.after)
            return result
        finally:
            self.forward = None
            forward.end()

    @contextmanager
    def inside(self, call: _RegionCall) -> Iterator[None]:
        """Make regions inside the context part of `call`."""
        self.call = call
        try:
            yield
        finally:
            self.call = None


@dataclass
class StreamHandoff:
    """Streams that one block of a group made, until the next block begins."""

    results: dict[int, _Entry] = field(default_factory=dict)


class Forward:
    """Forward of one block, whose results are dropped."""

    def __init__(self, recompute: BlockRecompute) -> None:
        self.recompute = recompute
        self._results: dict[int, _Entry] = {}

    def run(self, region: Region, fn: Callable[..., R], args: tuple[object, ...]) -> R:
        """Return `fn(*args)`; drop what it saves and what it returns.

        Between hyper-connections the mixer's result is kept: streams are mixed again from it.
        """
        call = _RegionCall(self, region, fn, args)
        result = call.first(self, args)
        mixed = region == "block" and "read_streams" in self.recompute.regions
        for i, t in enumerate(() if mixed else _tensors(result)):
            if _address(t) not in call.arguments and not _is_parameter(t):
                self._results[_address(t)] = _Entry(call, i, t)
        return result

    def pack(self, t: Tensor) -> Any:
        """Return what autograd saves instead of `t`, outside of regions.

        Args:
            t: any shape.
        """
        handle = self.find(t)
        if handle is not None:
            return handle
        if _is_parameter(t):
            return t
        # Detached: what an operator saves of its own results would hold the operator.
        return self.recompute.store(t.detach()) if self.recompute.everything else t.detach()

    def end(self) -> None:
        """Forget results: saved tensors hold this object, and would hold regions' arguments."""
        self._results.clear()

    def take(self, handoff: StreamHandoff) -> None:
        """Take over the streams of the block in front as results that can be recomputed."""
        self._results |= handoff.results
        handoff.results = {}

    def leave(self, result: Any, handoff: StreamHandoff) -> None:
        """Hand this block's streams to the next block."""
        places = map(_address, _tensors(result))
        handoff.results = {p: self._results[p] for p in places if p in self._results}

    def find(self, t: Tensor) -> _Result | None:
        """Return the handle of `t` if it is a view of an earlier region's result, else None.

        Args:
            t: any shape.
        """
        entry = self._results.get(_address(t))
        return None if entry is None else entry.handle(t)


class _Entry:
    """Result of a region, as it was returned.

    The weak reference prevents the storage's address from being reused while it is looked up.
    """

    def __init__(self, call: _RegionCall, index: int, t: Tensor) -> None:
        self.call, self.index = call, index
        self.storage = StorageWeakRef(t.untyped_storage())
        self.dtype, self.version = t.dtype, t._version

    def handle(self, t: Tensor) -> _Result | None:
        # A result that was changed in place is not what the region would make again.
        if self.storage.expired() or t.dtype != self.dtype or t._version != self.version:
            return None
        self.call.results_wanted += 1
        return _Result(self.call, self.index, t)


class _Result:
    """Handle of a view of the `index`-th result of a call."""

    def __init__(self, call: _RegionCall, index: int, t: Tensor) -> None:
        self.call, self.index = call, index
        self.place = t.size(), t.stride(), t.storage_offset()

    def get(self) -> Tensor:
        whole = self.call.results()[self.index]
        self.call.took_result()
        return whole.as_strided(*self.place)


@dataclass(frozen=True, eq=False)
class _Saved:
    """Handle of the `index`-th tensor that autograd saved in a call."""

    call: _RegionCall
    index: int

    def get(self) -> Tensor:
        return self.call.take_saved(self.index)


class _RegionCall:
    """Call of a region: what is needed to run it again, and the results of another run.

    These results live until every handle has taken its part, or until the graph is freed. A
    function that reads `ctx.saved_tensors` twice takes twice, and so has the region run twice.

    Attributes:
        saved: shape, dtype and device of dropped tensors, by index among all that autograd saved.
    """

    def __init__(
        self, forward: Forward, region: Region, fn: Callable[..., Any], args: tuple[object, ...]
    ) -> None:
        self.recompute, self.region, self.fn = forward.recompute, region, fn
        self.arguments = {_address(a) for a in args if isinstance(a, Tensor)}
        self.args = [_Argument.capture(a, forward) for a in args]
        self.context = RngAndAutocastState.now(args)
        self.decisions: list[Any] = []
        self.saved: dict[int, tuple[Any, ...]] = {}
        self.num_saves = self.results_wanted = 0
        self._deciding: Iterator[Any] | None = None
        self._again_saved: dict[int, Tensor] = {}
        self._again_results: list[Tensor] = []
        self._results_left = 0

    def first(self, forward: Forward, args: tuple[object, ...]) -> Any:
        """Run the region in the forward; RecomputeError if a graph captures random numbers."""
        drawing = self.recompute.replays.drawing
        if self.context.captured and self.region in drawing:
            raise RecomputeError(
                f"region {self.region} draws random numbers, which a CUDA graph can't draw again"
            )

        def pack(t: Tensor) -> Any:
            index, self.num_saves = self.num_saves, self.num_saves + 1
            handle = forward.find(t)
            if handle is not None:
                return handle
            if _is_parameter(t):
                return t
            if _address(t) in self.arguments and self.recompute.store is stay:
                return t.detach()
            self.saved[index] = tuple(t.shape), t.dtype, t.device
            return _Saved(self, index)

        with (
            saved_tensors_hooks(pack, unpack),
            self.recompute.inside(self),
            self.context.watched(),
        ):
            result = self.fn(*args)
        if self.context.random is not None:
            drawing.add(self.region)
        return result

    def decide(self, fn: Callable[..., R], args: tuple[object, ...]) -> R:
        """Return a decision, made by the first run and remembered for recomputation."""
        if self._deciding is not None:
            return next(self._deciding)
        self.decisions.append(fn(*args))
        return self.decisions[-1]

    def take_saved(self, index: int) -> Tensor:
        if index not in self._again_saved:
            self._run_again()
        return self._again_saved.pop(index)

    def results(self) -> list[Tensor]:
        if not self._again_results:
            self._run_again()
        return self._again_results

    def took_result(self) -> None:
        self._results_left -= 1
        if self._results_left <= 0:
            self._again_results = []

    def _run_again(self) -> None:
        args = [argument.get() for argument in self.args]
        collected: dict[int, Tensor] = {}
        seen = 0

        def pack(t: Tensor) -> None:
            nonlocal seen
            index, seen = seen, seen + 1
            if index in self.saved:
                self._check(index, t)
                collected[index] = t.detach()
                if len(collected) == len(self.saved) and not self.results_wanted:
                    raise _AllThere

        replays = self.recompute.replays
        replays.counts[self.region] = replays.counts.get(self.region, 0) + 1
        replays.running, self._deciding = True, iter(self.decisions)
        try:
            hooks = saved_tensors_hooks(pack, _never)
            with self.context.again(), self.recompute.inside(self), hooks, torch.enable_grad():
                results = [t.detach() for t in _tensors(self.fn(*args))]
        except _AllThere:
            results = []
        finally:
            replays.running, self._deciding = False, None
        if self.saved.keys() - collected.keys():
            raise RecomputeError(
                f"region {self.region} saved {self.num_saves} tensors and, run again, {seen}: "
                "it must do the same things each time"
            )
        self._again_saved, self._again_results = collected, results
        self._results_left = self.results_wanted

    def _check(self, index: int, t: Tensor) -> None:
        found = tuple(t.shape), t.dtype, t.device
        if self.recompute.check == "default" and found != self.saved[index]:
            raise RecomputeError(
                f"region {self.region} saved {self.saved[index]} and, run again, {found}: "
                "it must do the same things each time"
            )


@dataclass(frozen=True, eq=False)
class _Argument:
    """Argument of a region: any object, or a tensor that is saved, stored or recomputed."""

    kept: Any
    requires_grad: bool | None  # None: given as it is
    version: int | None = None

    @staticmethod
    def capture(arg: object, forward: Forward) -> _Argument:
        if not isinstance(arg, Tensor) or _is_parameter(arg):
            return _Argument(arg, None)
        handle = forward.find(arg)
        if handle is not None:
            return _Argument(handle, arg.requires_grad)
        kept = forward.recompute.store(arg.detach())
        version = kept._version if isinstance(kept, Tensor) else None
        return _Argument(kept, arg.requires_grad, version)

    def get(self) -> Any:
        if self.requires_grad is None:
            return self.kept
        if self.version is not None and self.kept._version != self.version:
            raise RecomputeError(
                "an argument of a region was changed in place after the region ran"
            )
        return unpack(self.kept).detach().requires_grad_(self.requires_grad)


class _AllThere(Exception):  # noqa: N818 - it is none
    """Signal that ends a recomputation once all dropped tensors are available."""


def unpack(held: Any) -> Tensor:
    """Return the tensor that autograd saved."""
    return held if isinstance(held, Tensor) else held.get()


def _never(_: Any) -> Tensor:
    raise AssertionError("no backward runs through a recomputed region")


def _tensors(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [t for t in parts if isinstance(t, Tensor)]


def _is_parameter(t: Tensor) -> bool:
    whole = t if t._base is None else t._base
    return isinstance(whole, nn.Parameter) or (whole.is_leaf and whole.requires_grad)


def _address(t: Tensor) -> int:
    return t.untyped_storage()._cdata
