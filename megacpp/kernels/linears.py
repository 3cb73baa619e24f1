"""Linear layers that read one input, and those whose weight is kept wider than their input.

    linears         gradients of the one input are added inside the products
    wide_linear     a router's product: no wide copy of the input is kept

Autograd alone adds the layers' gradients of the input in kernels of their own: n - 1 for n layers.

Legend: D input width, O outputs of one layer; T rows, E outputs where few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.torch_extras import autocast_dtype, cast, needs_input_grad_now


def linears(
    x: Tensor,
    *layers: nn.Linear,
    thin: Tensor | None = None,
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> tuple[Tensor, ...]:
    """Return what each layer makes of `x`, and last `linear(x, thin)` if `thin` is given.

    Layers with a bias, and those whose call is something else than `F.linear`, are called.

    Args:
        x: `[..., D]`.
        layers: n of them, `[..., D]` to `[..., O]`.
        thin: weights of several layers, one below the other, `[O, D]`.
        linear: product with them.
    """
    plain = all(is_plain(layer) and layer.bias is None for layer in layers)
    if not plain or linear is not F.linear:
        last = () if thin is None else (linear(x, thin),)
        return *(layer(x) for layer in layers), *last
    weights = [layer.weight for layer in layers]
    return products(x, *weights, *(() if thin is None else (thin,)))


def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return `F.linear(x, w)` of each weight, cast as autocast casts it.

    Args:
        x: `[..., D]`.
        weights: each `[O, D]`.
    """
    if len(weights) == 1 or torch.compiler.is_compiling():
        return tuple(F.linear(x, weight) for weight in weights)
    return _Products.apply(x, *weights, autocast_dtype(x))  # type: ignore[return-value]


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


def is_plain(linear: nn.Linear) -> bool:
    """Return whether calling a linear layer is `F.linear` of its weight.

    It is not if its forward was replaced or a hook is registered.
    """
    own = type(linear).forward is nn.Linear.forward and "forward" not in vars(linear)
    hooks = (linear._forward_hooks, linear._forward_pre_hooks)
    return own and not any(hooks) and not (linear._backward_hooks or linear._backward_pre_hooks)


class _Products(torch.autograd.Function):
    """Products y = x w^T of several w, with dw = dy^T x and dx = sum of dy w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        *weights, ctx.dtype = given
        ctx.dtypes = [weight.dtype for weight in weights]
        weights = [cast(weight, ctx.dtype) for weight in weights]
        ctx.save_for_backward(x, *weights)  # copies, as autograd saves those of autocast
        x = cast(x, ctx.dtype)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        need_x, *needed = needs_input_grad_now(ctx)[:-1]
        flat = cast(x, ctx.dtype).reshape(-1, x.shape[-1])
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in grads]
        dx, dw = None, []
        for dy, weight, need_w, dtype in zip(rows, weights, needed, ctx.dtypes, strict=True):
            if need_x:  # `out`: FlopCounterMode doesn't know addmm_
                dx = torch.mm(dy, weight) if dx is None else torch.addmm(dx, dy, weight, out=dx)
            dw.append((dy.mT @ flat).to(dtype) if need_w else None)
        return dx if dx is None else dx.view(x.shape).to(x.dtype), *dw, None


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
    @torch.autograd.function.once_differentiable
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
