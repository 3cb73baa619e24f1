"""Gradients that the running backward asks an autograd Function for."""

from __future__ import annotations

from typing import Any

import torch


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
