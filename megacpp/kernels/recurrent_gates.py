"""Decays and output gates of the recurrent mixers; gates save their arguments and nothing wider.

Plain autograd would keep the gate in fp32 before and after its SiLU, and both factors of every
product. Backward works them out again from the narrow tensors: a few elementwise passes. Those
whose `backend` is Triton's are one pass each way, and keep what they are given alone.

Legend: B rows, T tokens, H heads, R MIMO rank, P head dim of Mamba-3; N heads, V value of M2RNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.torch_extras import once_differentiable, wide


def gated_ranks(
    y_BTHRP: Tensor,
    z_BTHP: Tensor | None,
    norm_HP: Tensor | None,
    mimo_z_HRP: Tensor | None,
    mimo_o_HRP: Tensor | None,
    norm_eps: float,
    dtype: torch.dtype,
    backend: str = "torch",
) -> Tensor:
    """Return the sum over ranks of norm(y) silu(z mimo_z) mimo_o, `[B, T, H, P]` in `dtype`.

    Tensors that are None are left out; computed in at least fp32. Saves y and z as they are for
    backward.

    Args:
        y_BTHRP: outputs of the ranks.
        z_BTHP: gate.
        norm_HP: weight of the norm.
        mimo_z_HRP: gate weights of the ranks.
        mimo_o_HRP: output weights of the ranks.
        norm_eps: added to the mean square.
        dtype: of the result.
        backend: of `gates` (megacpp/kernels/selection.py); Triton's has a norm, a gate and no more.
    """
    alone = mimo_z_HRP is None and mimo_o_HRP is None and y_BTHRP.shape[1] > 1
    if alone and z_BTHP is not None and norm_HP is not None and by_triton(backend, z_BTHP[..., 0]):
        given = y_BTHRP.squeeze(3), z_BTHP, norm_HP
        return in_triton("gated_norm", _gated_norm, (norm_eps, dtype), *given)
    return _GatedRanks.apply(  # type: ignore[return-value]
        y_BTHRP, z_BTHP, norm_HP, mimo_z_HRP, mimo_o_HRP, norm_eps, dtype
    )


def gated_residual(
    y_NV: Tensor, v_NV: Tensor, D_NV: Tensor, g_X: Tensor, backend: str = "torch"
) -> Tensor:
    """Return (y + v D) silu(g), `[..., N V]` in at least fp32; saves y, v and g for backward.

    Args:
        y_NV: `[..., N, V]`.
        v_NV: `[..., N, V]`.
        D_NV: skip weights.
        g_X: gate, `[..., N V]`.
        backend: of `gates` (megacpp/kernels/selection.py).
    """
    if backend == "reference":
        return _plain_residual(y_NV, v_NV, D_NV, g_X)
    if by_triton(backend, g_X):
        return in_triton("gated_residual", _plain_residual, (), y_NV, v_NV, D_NV, g_X)
    return _GatedResidual.apply(y_NV, v_NV, D_NV, g_X)  # type: ignore[return-value]


def decay(
    x_BTN: Tensor, A_log_N: Tensor, bias_N: Tensor, factor: bool, backend: str = "torch"
) -> Tensor:
    """Return -exp(A_log) softplus(x + bias), in at least fp32; or its exp, a factor in (0, 1).

    Args:
        x_BTN: from the projection, `[..., N]`.
        A_log_N: log of the rates.
        bias_N: added to x.
        factor: return the exp.
        backend: of `gates` (megacpp/kernels/selection.py).
    """
    if by_triton(backend, x_BTN):
        return in_triton("decay", _plain_decay, (factor,), x_BTN, A_log_N, bias_N)
    return _plain_decay(x_BTN, A_log_N, bias_N, factor)


def steps(
    dt_BTH: Tensor,
    a_BTH: Tensor,
    bias_H: Tensor,
    floor: float,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Return Mamba-3's log decay A dt and step dt, `[B, H, T]` in at least fp32.

    The step is softplus(dt + bias), and A = -max(f(a), floor).

    Args:
        dt_BTH: from the projection.
        a_BTH: from the projection.
        bias_H: added to dt.
        floor: least -A.
        softplus: is f; else 1 + a for a >= 0 and 1 / (1 - a) below: slope and value continuous,
            slow to reach 0.
    """
    DT_BHT = F.softplus(wide(dt_BTH) + bias_H).mT
    return decay_rate(wide(a_BTH), floor, softplus).mT * DT_BHT, DT_BHT


def decay_rate(a: Tensor, floor: float, softplus: bool) -> Tensor:
    """Return A = -max(f(a), floor) of any shape, with f as in `steps`.

    Args:
        a: in at least fp32.
        floor: least -A.
        softplus: is f.
    """
    if softplus:
        return -F.softplus(a).clamp(min=floor)
    above = F.relu(a)  # a.clamp(max=0) has no slope at 0 from torch 2.15 on
    return -(above + (1.0 - (a - above)).reciprocal()).clamp(min=floor)


def in_triton(
    name: str, form: Callable[..., Any] | None, how: tuple[Any, ...], *given: Tensor
) -> Any:
    """Return a gate of triton_gates.py, which imports Triton, or in a compiled graph torch's form.

    Args:
        name: of the gate.
        form: torch's, of the same arguments; None: a graph has the kernel, too.
        how: arguments behind the tensors.
        given: tensors, which are saved for backward.
    """
    from megacpp.kernels.triton_gates import Gate

    return Gate.apply(name, form, how, *given)


def by_triton(backend: str, x: Tensor) -> bool:
    """Return whether Triton's kernels do it: of rows of tokens, `[B, T, ...]`."""
    return backend == "triton" and x.ndim == 3


def _plain_decay(x_BTN: Tensor, A_log_N: Tensor, bias_N: Tensor, factor: bool) -> Tensor:
    log_BTN = -torch.exp(A_log_N) * F.softplus(wide(x_BTN) + bias_N)
    return torch.exp(log_BTN) if factor else log_BTN


def _plain_residual(y_NV: Tensor, v_NV: Tensor, D_NV: Tensor, g_X: Tensor) -> Tensor:
    return F.silu(wide(g_X)) * (y_NV + v_NV * D_NV).flatten(-2)


def _gated_norm(
    x_BTHP: Tensor, z_BTHP: Tensor, weight_HP: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    normed = F.rms_norm(wide(x_BTHP), x_BTHP.shape[-1:], None, eps) * weight_HP
    return (normed * F.silu(wide(z_BTHP))).to(dtype)


class _GatedRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_BTHRP: Tensor,
        z_BTHP: Tensor | None,
        norm_HP: Tensor | None,
        mimo_z_HRP: Tensor | None,
        mimo_o_HRP: Tensor | None,
        norm_eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(y_BTHRP, z_BTHP, norm_HP, mimo_z_HRP, mimo_o_HRP)
        ctx.norm_eps = norm_eps
        y_BTHRP = wide(y_BTHRP)
        out_BTHRP, _ = _normed(y_BTHRP, norm_HP, norm_eps)
        if z_BTHP is not None:
            # The gate first: the product then has its layout, by token, not that of the chunks.
            out_BTHRP = F.silu(_gate(z_BTHP, mimo_z_HRP)).mul_(out_BTHRP)
        if mimo_o_HRP is None:
            return out_BTHRP.squeeze(3).to(dtype, copy=out_BTHRP is y_BTHRP)
        return (out_BTHRP * mimo_o_HRP).sum(3).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_BTHRP, z_BTHP, norm_HP, mimo_z_HRP, mimo_o_HRP = ctx.saved_tensors
        dz = dnorm = dmimo_z = dmimo_o = None
        y_dtype, y_BTHRP = y_BTHRP.dtype, wide(y_BTHRP)
        x_BTHRP, rstd_BTHR1 = _normed(y_BTHRP, norm_HP, ctx.norm_eps)
        dout_BTHRP = wide(grads[0])[..., None, :]
        gate = silu = None
        if z_BTHP is not None:
            gate = _gate(z_BTHP, mimo_z_HRP)
            silu = F.silu(gate)
        product = dout_BTHRP * x_BTHRP
        if mimo_o_HRP is not None:
            dmimo_o = (product if silu is None else product * silu).sum((0, 1))
            product, dout_BTHRP = product.mul_(mimo_o_HRP), dout_BTHRP * mimo_o_HRP
        # The gradient of y has y's layout, that of the chunks, for the scan's backward.
        if torch.compiler.is_compiling():  # which chooses layouts itself, and doesn't support `out`
            dx_BTHRP = dout_BTHRP * (1.0 if silu is None else silu)
        else:
            dx_BTHRP = torch.empty_like(y_BTHRP)
            torch.mul(dout_BTHRP, 1.0 if silu is None else silu, out=dx_BTHRP)
        if z_BTHP is not None and gate is not None:
            dgate = torch.ops.aten.silu_backward(product, gate)
            if mimo_z_HRP is not None:
                dmimo_z = (dgate * z_BTHP[..., None, :]).sum((0, 1))
                dgate = dgate.mul_(mimo_z_HRP).sum(3, keepdim=True)
            dz = dgate.squeeze(3).to(z_BTHP.dtype)
        if norm_HP is not None and rstd_BTHR1 is not None:
            dx_BTHRP, dnorm = _norm_backward(dx_BTHRP, y_BTHRP, rstd_BTHR1, norm_HP)
        return dx_BTHRP.to(y_dtype), dz, dnorm, dmimo_z, dmimo_o, None, None


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NV: Tensor, v_NV: Tensor, D_NV: Tensor, g_X: Tensor) -> Tensor:
        ctx.save_for_backward(y_NV, v_NV, D_NV, g_X)
        return F.silu(wide(g_X)).mul_((y_NV + v_NV * D_NV).flatten(-2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        y_NV, v_NV, D_NV, g_X = ctx.saved_tensors
        gate_X, sum_X = wide(g_X), (y_NV + v_NV * D_NV).flatten(-2)
        dg_X = torch.ops.aten.silu_backward(sum_X.mul_(grads[0]), gate_X)
        dsum_NV = F.silu(gate_X).mul_(grads[0]).view(v_NV.shape)
        dD_NV = (dsum_NV * v_NV).flatten(0, -3).sum(0)
        return dsum_NV.to(y_NV.dtype), (dsum_NV * D_NV).to(v_NV.dtype), dD_NV, dg_X.to(g_X.dtype)


def _gate(z_BTHP: Tensor, mimo_z_HRP: Tensor | None) -> Tensor:
    """Return the argument of silu for each rank, `[B, T, H, R, P]`."""
    z_BTH1P = z_BTHP[..., None, :]
    return wide(z_BTH1P if mimo_z_HRP is None else z_BTH1P * mimo_z_HRP)


def _normed(y_BTHRP: Tensor, norm_HP: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return the RMSNorm over P with a weight per head, and 1 / rms."""
    if norm_HP is None:
        return y_BTHRP, None
    rstd_BTHR1 = y_BTHRP.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (y_BTHRP * rstd_BTHR1).mul_(norm_HP[:, None]), rstd_BTHR1


def _norm_backward(
    dx_BTHRP: Tensor, y_BTHRP: Tensor, rstd_BTHR1: Tensor, norm_HP: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y and of the weight of `_normed`."""
    unit_BTHRP = y_BTHRP * rstd_BTHR1
    dnorm_HP = (dx_BTHRP * unit_BTHRP).sum((0, 1, 3))
    dunit_BTHRP = dx_BTHRP.mul_(norm_HP[:, None])
    along_BTHR1 = (dunit_BTHRP * unit_BTHRP).mean(-1, keepdim=True)
    return dunit_BTHRP.addcmul_(unit_BTHRP, along_BTHR1, value=-1).mul_(rstd_BTHR1), dnorm_HP
