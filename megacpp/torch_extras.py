"""Small things that torch lacks: what autograd and autocast ask for, local shards, quiet copies.

`torch.distributed.tensor` takes as long to import as the rest of torch beyond its core (sympy); a
process without DTensors doesn't need it.

A copy from memory that the system may page out waits until it is done, and so for everything that
was put into the device's queue before it. From pinned memory it takes its place in the queue;
torch's allocator of pinned memory keeps what a copy still reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives `x`, of any shape, or None when it leaves it alone."""
    device = x.device.type
    # Not torch.amp.is_autocast_available: the compiler of torch 2.11 can't look into it. Of the
    # devices that tensors have here only `meta` knows no autocast.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast, which the meta device never has.

    Args:
        x: any shape; its device.
    """
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `x` of any shape in `dtype`; None: as it is."""
    return x if dtype is None else x.to(dtype)


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or unchanged when it is fp64 already; any shape."""
    return x if x.dtype == torch.float64 else x.float()


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `once_differentiable` of a Function's backward, for the fewest calls.

    torch's turns gradients off around every backward. They are on in those alone that are
    differentiated themselves (`create_graph`).
    """
    guarded = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def chosen(ctx: Any, *grads: Tensor | None) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *grads)

    return chosen


def needs_input_grad_now(ctx: Any) -> tuple[bool, ...]:
    """Return for each input of the Function whether its gradient is used in this walk of the graph.

    `ctx.needs_input_grad` is fixed in the forward (pytorch#56500). Zero-bubble pipelines walk a
    graph twice, once for gradients of inputs and once for those of weights: a Function that heeds
    this instead computes neither of them twice. Call it within `backward`; tensors must be the
    first inputs.
    """
    needed = ctx.needs_input_grad
    if torch.compiler.is_compiling():  # the compiler takes out what no output needs
        return needed
    inputs = zip(needed, ctx.next_functions, strict=False)
    now = [need and node is not None and _reached(node) for need, (node, _) in inputs]
    return *now, *needed[len(now) :]


def _reached(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # The engine says so of a leaf that this walk ends at: torch.autograd.grad asks for it.
        if "leaf node" not in str(error):
            raise
        return True


def is_dtensor(t: object) -> TypeGuard[DTensor]:
    """Return whether `t` is a DTensor; False as long as the class isn't imported."""
    return isinstance(t, _dtensor_class())


def dtensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return those of some tensors, of any shapes, that are DTensors."""
    kind = _dtensor_class()
    return [t for t in tensors if isinstance(t, kind)] if kind else []


def _dtensor_class() -> type[DTensor] | tuple[()]:
    """Return the class DTensor, or as long as it isn't imported (), of which nothing is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def local_part(t: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, sharing memory, or a plain tensor itself.

    Call it without gradients and at every step: FSDP2 may replace a parameter's storage.

    Args:
        t: any shape.
    """
    return t._local_tensor if is_dtensor(t) else t  # `to_local` makes a view of a parameter


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `local_part` of each tensor, of any shapes."""
    kind = _dtensor_class()
    return [t._local_tensor if isinstance(t, kind) else t for t in tensors] if kind else [*tensors]


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return `x.to(device)`; a copy from the host to a GPU doesn't make the host wait.

    Args:
        x: any shape.
        device: target.
    """
    there = torch.device(device)
    real = type(x) is Tensor and x.device.type == "cpu"
    if real and there.type == "cuda" and torch.cuda.is_available():
        whole = x.contiguous()  # rows may be one row, seen several times
        return whole.pin_memory().to(there, non_blocking=True)
    return x.to(there)


def listed(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor `[len(values)]` of a few numbers that the host knows.

    A compiler makes them constants.
    """
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name a part of a step in a trace; without a trace it costs one check."""
    if not torch.autograd._profiler_enabled():
        yield
        return
    with torch.profiler.record_function(name):
        yield
