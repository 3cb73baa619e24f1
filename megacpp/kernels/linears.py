"""Linear layers of a block that keep less than autograd alone would, or take fewer kernels.

    linears         layers of one input, whose gradients are added inside the products; autograd
                    takes n - 1 kernels for those of n layers. Where gradients of the outputs lie
                    side by side in memory, one product makes those of all weights
    gated_linear    w2 h with h = silu(gate) * up or relu(gate)^2, a feed-forward's second half,
                    without saving h: the backward makes it again from gate and up, the only two
                    saved activations of hidden width
    wide_linear     a router's product: its weight is wider than its input, of which no wide copy is
                    kept

Legend: S rows, D input width, O outputs of one layer, F hidden; of a router T rows, E outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacpp.torch_extras import autocast_dtype, cast, needs_input_grad_now, once_differentiable


def linears(
    x: Tensor,
    *layers: nn.Linear,
    thin: Tensor | None = None,
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
    one_tensor: bool = False,
) -> tuple[Tensor, ...]:
    """Return what each layer makes of `x`, and last `linear(x, thin)` if `thin` is given.

    Layers with a bias, and those whose call is something else than `F.linear`, are called.

    Args:
        x: `[..., D]`.
        layers: n of them, `[..., D]` to `[..., O]`.
        thin: weights of several layers, one below the other, `[O, D]`.
        linear: product with them.
        one_tensor: results may be columns of one tensor, whose memory is freed with the last of
            them: one product, if autocast casts weights. FSDP2 gathers them to memories apart.
    """
    plain = all(is_plain(layer) and layer.bias is None for layer in layers)
    if not plain or linear is not F.linear:
        last = () if thin is None else (linear(x, thin),)
        return *(layer(x) for layer in layers), *last
    weights: list[Tensor] = [layer.weight for layer in layers]
    if thin is not None:
        weights.append(thin)
    if len(weights) == 1:
        return (F.linear(x, weights[0]),)
    dtype = autocast_dtype(x)
    joint = one_tensor and all(weight.dtype != (dtype or weight.dtype) for weight in weights)
    return _Products.apply(x, *weights, (dtype, joint))  # type: ignore[return-value]


def is_plain(linear: nn.Linear) -> bool:
    """Return whether calling a linear layer is `F.linear` of its weight.

    It is not if its forward was replaced or a hook is registered.
    """
    own = type(linear).forward is nn.Linear.forward and "forward" not in linear.__dict__
    hooks = linear._forward_hooks or linear._forward_pre_hooks
    return own and not (hooks or linear._backward_hooks or linear._backward_pre_hooks)


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
    return _GatedLinear.apply(gate, w_DF, up, how)  # type: ignore[return-value]


def gated_product(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return the definition of `gated`, in torch's operators.

    Args:
        gate: `[..., F]`.
        up: `[..., F]`, or None.
    """
    return F.relu(gate).square() if up is None else F.silu(gate) * up


def active(gate: Tensor, up: Tensor | None) -> Tensor:
    """Return silu(gate), or relu(gate) where there is no `up`, both `[..., F]`."""
    return F.relu(gate) if up is None else F.silu(gate)


def gate_gradients(
    dh: Tensor, active: Tensor, gate: Tensor, up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of gate and up, rounded in the order in which autograd rounds them.

    Args:
        dh: gradient of the gated product, `[..., F]`.
        active: relu(gate) or silu(gate), `[..., F]`; overwritten.
        gate: `[..., F]`.
        up: `[..., F]`, or None.
    """
    if up is None:
        return torch.ops.aten.threshold_backward((2.0 * active).mul_(dh), active, 0.0), None
    return torch.ops.aten.silu_backward(dh * up, gate), active.mul_(dh)


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


class _Products(torch.autograd.Function):
    """Products y = x w^T of several w, with dw = dy^T x and dx = sum of dy w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        *weights, (ctx.dtype, joint) = given
        ctx.dtypes, ctx.outputs = [weight.dtype for weight in weights], [*map(len, weights)]
        if joint:
            from megacpp.kernels.joint_gradients import one_cast
        made = [one_cast(weights, ctx.dtype)] if joint else [cast(w, ctx.dtype) for w in weights]
        ctx.save_for_backward(x, *made)  # copies, as autograd saves those of autocast
        x = cast(x, ctx.dtype)
        outputs = tuple(F.linear(x, weight) for weight in made)
        return outputs[0].split(ctx.outputs, -1) if joint else outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        joint = weights[0] if len(weights) == 1 else None
        weights = weights if joint is None else joint.split(ctx.outputs)
        need_x, *needed = needs_input_grad_now(ctx)[:-1]
        flat = cast(x, ctx.dtype).reshape(-1, x.shape[-1])
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in grads]
        dx, dw = None, []
        apart = torch.compiler.is_compiling() or rows[0].stride(0) > rows[0].shape[1]
        if apart and len({*needed}) == 1:
            from megacpp.kernels.joint_gradients import joint_gradients

            given = rows, weights, flat, need_x, needed[0], ctx.dtypes, joint
            dx, dw = joint_gradients(*given) or (dx, dw)
        for dy, weight, need_w in zip(rows, weights, needed, strict=True) if not dw else ():
            if need_x:  # `out`: FlopCounterMode doesn't know addmm_
                dx = torch.mm(dy, weight) if dx is None else torch.addmm(dx, dy, weight, out=dx)
            dw.append(torch.mm(dy.t(), flat) if need_w else None)
        dw = [w if w is None else w.to(dtype) for w, dtype in zip(dw, ctx.dtypes, strict=True)]
        return dx if dx is None else dx.view(x.shape).to(x.dtype), *dw, None


class _GatedLinear(torch.autograd.Function):
    """Product w2 h with dw2 = dy^T h, dh = dy w2; by torch h is never alive beside its gradient."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, w_DF: Tensor, up: Tensor | None, how: tuple[Any, str]
    ) -> Tensor:
        ctx.save_for_backward(gate, w_DF, up)
        dtype, backend = ctx.dtype, ctx.backend = how
        product = in_triton().hidden if backend == "triton" else gated_product
        return F.linear(cast(product(gate, up), dtype), cast(w_DF, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, w_DF, up = ctx.saved_tensors
        need_gate, need_w, need_up = needs_input_grad_now(ctx)[:3]
        dgate = dw_DF = dup = None

        def of_weight(h: Tensor) -> Tensor:
            h_SF = cast(h, ctx.dtype).reshape(-1, h.shape[-1])
            return torch.mm(dy.reshape(-1, dy.shape[-1]).t(), h_SF).to(w_DF.dtype)

        def of_product() -> Tensor:
            return (dy @ cast(w_DF, ctx.dtype)).to(gate.dtype)

        if ctx.backend == "triton" and (need_gate or need_up):
            given = dy, cast(w_DF, ctx.dtype), gate, up, need_w
            h, dgate, dup = in_triton().linear_backward(*given)
            return dgate, None if h is None else of_weight(h), dup, None
        acted = active(gate, up)
        if need_w:
            dw_DF = of_weight(acted.square() if up is None else acted * up)
        if need_gate or need_up:
            dgate, dup = gate_gradients(of_product(), acted, gate, up)
        return dgate, dw_DF, dup, None


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


def in_triton() -> Any:
    """Return triton_gates.py, which imports Triton."""
    from megacpp.kernels import triton_gates

    return triton_gates
