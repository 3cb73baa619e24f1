"""Gated product of a feed-forward whose second layer is called apart, as one in FP8 is.

Legend: F hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.linears import active, gate_gradients, gated_product, in_triton
from megacpp.torch_extras import once_differentiable


def gated(gate: Tensor, up: Tensor | None = None, backend: str = "torch") -> Tensor:
    """Return silu(gate) * up (SwiGLU), or relu(gate)^2 where there is no `up`; saves its arguments.

    Args:
        gate: `[..., F]`.
        up: `[..., F]`, or None.
        backend: of `gates` (megacpp/kernels/selection.py).
    """
    if torch.compiler.is_compiling() or backend == "reference":
        return gated_product(gate, up)
    return _Gated.apply(gate, up, backend)  # type: ignore[return-value]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, backend: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        return in_triton().hidden(gate, up) if backend == "triton" else gated_product(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.backend == "triton":
            return *in_triton().hidden_backward(dh.clone(), *ctx.saved_tensors)[1:], None
        gate, up = ctx.saved_tensors
        return *gate_gradients(dh, active(gate, up), gate, up), None
