"""Second half of a feed-forward, w2 h with h = silu(gate) * up or relu(gate)^2, without saving h.

The backward computes h again from gate and up, the only two saved activations of hidden width:
autograd alone would save silu(gate) and h as well, twice as much.

Legend: F hidden, D out; tensors are `(..., F)` and `(..., D)`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.torch_extras import autocast_dtype, cast, needs_input_grad_now


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


def gated_linear(
    w_DF: Tensor, gate: Tensor, up: Tensor | None = None, backend: str = "torch"
) -> Tensor:
    """Return `F.linear(gated_product(gate, up), w_DF)`, by torch bit for bit; saves its arguments.

    Under autocast the product and the weight are cast as `F.linear` casts them, and again in
    backward: no copy is saved.

    Args:
        w_DF: weight.
        gate: `[..., F]`.
        up: `[..., F]`, or None.
        backend: of `gates` (megacpp/kernels/selection.py).
    """
    if torch.compiler.is_compiling() or backend == "reference":
        return F.linear(gated_product(gate, up), w_DF)
    how = autocast_dtype(gate), backend
    return _GatedLinear.apply(gate, w_DF, up, *how)  # type: ignore[return-value]


def gated_product(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return the definition of `gated`, in torch's operators.

    Args:
        gate: `[..., F]`.
        up: `[..., F]`, or None.
    """
    return F.relu(gate).square() if up is None else F.silu(gate) * up


def gated_gradients(
    dh: Tensor, gate: Tensor, up: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gate and up, in autograd's own order of rounding.

    Args:
        dh: gradient of their product, `[..., F]`.
        gate: `[..., F]`.
        up: `[..., F]`, or None.
    """
    return _gradients(dh, F.relu(gate) if up is None else F.silu(gate), gate, up)


def _gradients(
    dh: Tensor, active: Tensor, gate: Tensor, up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return `gated_gradients`, given relu(gate) or silu(gate), whose memory is reused."""
    if up is None:
        return torch.ops.aten.threshold_backward((2.0 * active).mul_(dh), active, 0.0), None
    return torch.ops.aten.silu_backward(dh * up, gate), active.mul_(dh)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, backend: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        return in_triton().hidden(gate, up) if backend == "triton" else gated_product(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.backend == "triton":
            return *in_triton().hidden_backward(dh.clone(), *ctx.saved_tensors)[1:], None
        return *gated_gradients(dh, *ctx.saved_tensors), None


class _GatedLinear(torch.autograd.Function):
    """Product w2 h with dw2 = dy^T h, dh = dy w2; by torch h is never alive beside its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        w_DF: Tensor,
        up: Tensor | None,
        dtype: torch.dtype | None,
        backend: str,
    ) -> Tensor:
        ctx.save_for_backward(gate, w_DF, up)
        ctx.dtype, ctx.backend = dtype, backend
        product = in_triton().hidden if backend == "triton" else gated_product
        return F.linear(cast(product(gate, up), dtype), cast(w_DF, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, w_DF, up = ctx.saved_tensors
        need_gate, need_w, need_up = needs_input_grad_now(ctx)[:3]
        dgate = dw_DF = dup = None

        def of_weight(h: Tensor) -> Tensor:
            h_SF = cast(h, ctx.dtype).reshape(-1, h.shape[-1])
            return (dy.reshape(-1, dy.shape[-1]).mT @ h_SF).to(w_DF.dtype)

        def of_product() -> Tensor:
            return (dy @ cast(w_DF, ctx.dtype)).to(gate.dtype)

        if ctx.backend == "triton" and (need_gate or need_up):
            h, dgate, dup = in_triton().hidden_backward(of_product(), gate, up, need_w)
            return dgate, None if h is None else of_weight(h), dup, None, None
        active = F.relu(gate) if up is None else F.silu(gate)
        if need_w:
            dw_DF = of_weight(active.square() if up is None else active * up)
        if need_gate or need_up:
            dgate, dup = _gradients(of_product(), active, gate, up)
        return dgate, dw_DF, dup, None, None


def in_triton() -> Any:
    """Return triton_gates.py, which imports Triton."""
    from megacpp.kernels import triton_gates

    return triton_gates
