"""Dtypes and gradients that an autograd Function has to ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives `x`, of any shape, or None when it leaves it alone."""
    device = x.device.type
    # Not torch.amp.is_autocast_available: the compiler of torch 2.11 can't look into it. Of the
    # devices that tensors have here only `meta` knows no autocast.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `x` of any shape in `dtype`; None: as it is."""
    return x if dtype is None else x.to(dtype)


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or unchanged when it is fp64 already; any shape."""
    return x if x.dtype == torch.float64 else x.float()


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
    tensors = [node is not None and _reached(node) for node, _ in ctx.next_functions]
    return tuple(n and t for n, t in zip(needed, tensors, strict=False)) + needed[len(tensors) :]


def _reached(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # The engine says so of a leaf that this walk ends at: torch.autograd.grad asks for it.
        if "leaf node" not in str(error):
            raise
        return True
