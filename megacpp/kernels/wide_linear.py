"""Product of a router: its weight is wider than its input, of which no wide copy is kept.

Legend: T rows, D input width, E outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.torch_extras import needs_input_grad_now, once_differentiable


def wide_linear(x_TD: Tensor, weight_ED: Tensor, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """Return x W^T `[T, E]` in the dtype of the weight, saving `x` in its own, and x itself.

    Backward adds the gradient of the second result to that of the product in one pass. By torch
    the product is bit for bit `F.linear(x.to(weight.dtype), weight)`, of which autograd would keep
    the wide copy. The kernels read `x` as it is, and write no wide copy either.

    Args:
        x_TD: input.
        weight_ED: weight.
        backend: `triton` takes the kernels where x has 16 bits and the weight 32.
    """
    narrow = x_TD.dtype in (torch.bfloat16, torch.float16) and weight_ED.dtype == torch.float32
    kernels = backend == "triton" and narrow and not torch.compiler.is_compiling()
    with torch.autocast(x_TD.device.type, enabled=False):
        return _WideLinear.apply(x_TD, weight_ED, kernels)  # type: ignore[return-value]


class _WideLinear(torch.autograd.Function):
    """Product y = x w^T of a narrow x and a wide w; x is a second result."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, kernels: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels
        if kernels:
            from megacpp.kernels import triton_wide_linear

            return triton_wide_linear.forward(x_TD, weight_ED), x_TD.detach()
        return F.linear(x_TD.to(weight_ED.dtype), weight_ED), x_TD.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        (grad_TE, beside_TD), (x_TD, weight_ED) = grads, ctx.saved_tensors
        need_x, need_weight = needs_input_grad_now(ctx)[:2]
        if grad_TE is None:  # nothing learns from the product
            return beside_TD, None, None
        if ctx.kernels:
            from megacpp.kernels import triton_wide_linear as fused

            dx_TD = fused.input_gradient(grad_TE, weight_ED, x_TD, beside_TD) if need_x else None
            return dx_TD, (fused.weight_gradient(grad_TE, x_TD) if need_weight else None), None
        with torch.autocast(x_TD.device.type, enabled=False):
            dx_TD = grad_TE.mm(weight_ED).to(x_TD.dtype) if need_x else None
            dx_TD = dx_TD if dx_TD is None or beside_TD is None else dx_TD.add_(beside_TD)
            dw_ED = grad_TE.T.mm(x_TD.to(weight_ED.dtype)) if need_weight else None
        return dx_TD, dw_ED, None
