"""Decays and the gated residual by Triton: one launch forward, one backward and a sum.

    decay_log = -exp(A_log) softplus(x + bias)                  M2RNN takes its exp
    step = softplus(dt + bias), rate = -max(positive(a), floor), ADT = rate step       Mamba-3,
        and norm(C), norm(B)
    gated = (y + v D) silu(g)                                   M2RNN
    gated = norm(x) silu(z)                                     Gated DeltaNet

Numbers inside are fp32, and results are rounded once. Only inputs are kept. A program of a backward
takes every PROGRAMS-th block of tokens and adds up its part of a weight's gradient, so that sums
have one order.

Legend: B rows, T tokens of a row, N heads, V value, X = N V; P programs. Of Mamba-3 R MIMO rank, G
groups, W state size, C channels 2 R G W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacpp.kernels.experts.triton_units import units_backward, weighed_units
from megacpp.kernels.graph_operator import graph_operator
from megacpp.kernels.strides import launch, side_by_side
from megacpp.kernels.triton_gate_kernels import (
    _decay_backward_kernel,
    _decay_kernel,
    _norm_backward_kernel,
    _norm_kernel,
    _residual_backward_kernel,
    _residual_kernel,
    _steps_backward_kernel,
    _steps_kernel,
)
from megacpp.torch_extras import once_differentiable

TILE, COLUMNS = 2048, 1024  # numbers at a time, and how many of one token
PROGRAMS = 512  # of a backward: some for each of a GPU's processors


class Gate(torch.autograd.Function):
    """Function of this file by its name, and its backward.

    A compiled graph has torch's form, which the compiler fuses with its neighbours.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, form: Callable[..., Any] | None, how: tuple[Any, ...], *given: Tensor
    ) -> Any:
        """Return what the function, or torch's form of it, returns of `given` and `how`.

        Args:
            ctx, name: autograd's context, and a name of `GATES`.
            form: torch's form; None: a graph has the kernel, too.
            how, given: arguments behind the tensors, and these.
        """
        ctx.save_for_backward(*given)
        ctx.name, ctx.how = name, how
        if form is None or not torch.compiler.is_compiling():
            form = GATES[name][0]
        return form(*given, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `given`."""
        _, backward = GATES[ctx.name]
        return None, None, None, *backward(*grads, *ctx.saved_tensors, *ctx.how)


def decay(x_BTN: Tensor, A_log_N: Tensor, bias_N: Tensor, factor: bool) -> Tensor:
    """Return -exp(A_log) softplus(x + bias) in fp32, or with `factor` its exp, `[B, T, N]`.

    Args:
        x_BTN: from the projection.
        A_log_N: log of the rates.
        bias_N: added to x.
        factor: the exp.
    """
    out = torch.empty(x_BTN.shape, dtype=torch.float32, device=x_BTN.device)
    x_BTN = side_by_side(x_BTN)
    given = x_BTN, A_log_N.contiguous(), bias_N.contiguous(), out, *_places(x_BTN)
    _launch(_decay_kernel, _blocks(x_BTN), *given, FACTOR=factor, **_tile(x_BTN))
    return out


def decay_backward(
    dout_BTN: Tensor, x_BTN: Tensor, A_log_N: Tensor, bias_N: Tensor, factor: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, A_log and bias.

    Args:
        dout_BTN: gradient of the result.
        x_BTN: from the projection.
        A_log_N: log of the rates.
        bias_N: added to x.
        factor: the result is the exp.
    """
    dx_BTN, sum_2N = _decay_gradients(dout_BTN, x_BTN, A_log_N, bias_N, factor)
    dA_log_N, dbias_N = sum_2N.unbind()
    return dx_BTN, dA_log_N.to(A_log_N.dtype), dbias_N.to(bias_N.dtype)


@graph_operator("decay_backward")
def _decay_gradients(
    dout_BTN: Tensor, x_BTN: Tensor, A_log_N: Tensor, bias_N: Tensor, factor: bool
) -> tuple[Tensor, Tensor]:
    dx_BTN = torch.empty(x_BTN.shape, dtype=x_BTN.dtype, device=x_BTN.device)
    x_BTN, programs = side_by_side(x_BTN), PROGRAMS
    part_P2N = dx_BTN.new_empty(programs, 2, x_BTN.shape[-1], dtype=torch.float32)
    given = dout_BTN.contiguous(), x_BTN, A_log_N.contiguous(), bias_N.contiguous(), dx_BTN
    places = part_P2N, *_places(x_BTN), programs
    _launch(_decay_backward_kernel, programs, *given, *places, FACTOR=factor, **_tile(x_BTN))
    return dx_BTN, part_P2N.sum(0)


@graph_operator("steps_forward")
def steps(
    dt_BTN: Tensor,
    a_BTN: Tensor,
    bias_N: Tensor,
    bc_BTC: Tensor,
    C_weight_W: Tensor,
    B_weight_W: Tensor,
    ranks: int,
    eps: float,
    dtype: torch.dtype,
    floor: float,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Mamba-3's normed C and B, log decay A dt and step dt.

    Normed are groups of W numbers, to `[B, T, R, G, W]` in `dtype`; the rest is that of `steps` in
    recurrent_gates.py, `[B, N, T]` in fp32.

    Args:
        dt_BTN: from the projection.
        a_BTN: from the projection, as far apart in memory.
        bias_N: added to dt.
        bc_BTC: channels B | C, `C = 2 R G W`.
        C_weight_W: of the norm of each group of C.
        B_weight_W: of the norm of each group of B.
        ranks: R.
        eps: added to the mean square.
        dtype: of normed C and B.
        floor: least -A.
        softplus: makes -A of a; else 1 + a above 0 and 1 / (1 - a) below.
    """
    (B, T, N), W, device = dt_BTN.shape, len(C_weight_W), dt_BTN.device
    adt, step = (torch.empty(B, N, T, dtype=torch.float32, device=device) for _ in range(2))
    shape = B, T, ranks, bc_BTC.shape[-1] // (2 * ranks * W), W
    normed = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
    dt_BTN, a_BTN = _alike(dt_BTN, a_BTN)
    bc_BTC, how = side_by_side(bc_BTC), _steps_tile(dt_BTN, bc_BTC, W)
    given = dt_BTN, a_BTN, bias_N.contiguous(), bc_BTC, C_weight_W, B_weight_W, *normed, adt, step
    places = *_places(dt_BTN), *bc_BTC.stride()[:2], floor, eps
    _launch(_steps_kernel, -(-B * T // how["TOKENS"]), *given, *places, SOFTPLUS=softplus, **how)
    return normed[0], normed[1], adt, step


def steps_backward(
    dC: Tensor,
    dB: Tensor,
    dadt_BNT: Tensor,
    dstep_BNT: Tensor,
    dt_BTN: Tensor,
    a_BTN: Tensor,
    bias_N: Tensor,
    bc_BTC: Tensor,
    C_weight_W: Tensor,
    B_weight_W: Tensor,
    ranks: int,
    eps: float,
    dtype: torch.dtype,
    floor: float,
    softplus: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of dt, a, bias, the channels B | C and both weights.

    Args: those of `steps` behind gradients of its results:
        dC: gradient of normed C, `[B, T, R, G, W]`.
        dB: gradient of normed B, `[B, T, R, G, W]`.
    """
    given = dt_BTN, a_BTN, bias_N, bc_BTC, C_weight_W, B_weight_W
    ddt, da, dbc, sums = _steps_gradients(dC, dB, dadt_BNT, dstep_BNT, *given, eps, floor, softplus)
    N, W = len(bias_N), len(C_weight_W)
    dbias, *dweights = sums.split([N, W, W])
    return ddt, da, dbias, dbc, *dweights


@graph_operator("steps_backward")
def _steps_gradients(
    dC: Tensor,
    dB: Tensor,
    dadt_BNT: Tensor,
    dstep_BNT: Tensor,
    dt_BTN: Tensor,
    a_BTN: Tensor,
    bias_N: Tensor,
    bc_BTC: Tensor,
    C_weight_W: Tensor,
    B_weight_W: Tensor,
    eps: float,
    floor: float,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = dt_BTN, a_BTN, bc_BTC
    ddt, da, dbc = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given)
    (dt_BTN, a_BTN), N, W = _alike(dt_BTN, a_BTN), dt_BTN.shape[-1], len(C_weight_W)
    bc_BTC, programs = side_by_side(bc_BTC), PROGRAMS
    part_PX = ddt.new_empty(programs, N + 2 * W, dtype=torch.float32)
    grads = dC.contiguous(), dB.contiguous(), dadt_BNT.contiguous(), dstep_BNT.contiguous()
    given = dt_BTN, a_BTN, bias_N.contiguous(), bc_BTC, C_weight_W, B_weight_W, ddt, da, dbc
    places = part_PX, *_places(dt_BTN), *bc_BTC.stride()[:2], floor, eps, programs
    fixed = _steps_tile(dt_BTN, bc_BTC, W) | {"SOFTPLUS": softplus}
    _launch(_steps_backward_kernel, programs, *grads, *given, *places, **fixed)
    return ddt, da, dbc, part_PX.sum(0, dtype=bias_N.dtype)


def gated_residual(y_NV: Tensor, v_NV: Tensor, D_NV: Tensor, g_X: Tensor) -> Tensor:
    """Return (y + v D) silu(g), `[..., X]` in fp32.

    Args:
        y_NV: `[B, T, N, V]`.
        v_NV: `[B, T, N, V]`.
        D_NV: skip weights.
        g_X: gate, `[B, T, X]`.
    """
    out = torch.empty(g_X.shape, dtype=torch.float32, device=g_X.device)
    y, v, g = y_NV.flatten(-2).contiguous(), v_NV.flatten(-2).contiguous(), g_X.contiguous()
    given = y, v, D_NV.contiguous(), g, out, *_places(g)
    _launch(_residual_kernel, _blocks(g), *given, **_tile(g))
    return out


@graph_operator("gated_residual_backward")
def gated_residual_backward(
    dout_X: Tensor, y_NV: Tensor, v_NV: Tensor, D_NV: Tensor, g_X: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, v, D and g.

    Args:
        dout_X: gradient of the result, `[B, T, X]`.
        y_NV: `[B, T, N, V]`.
        v_NV: `[B, T, N, V]`.
        D_NV: skip weights.
        g_X: gate, `[B, T, X]`.
    """
    y, v, g = y_NV.flatten(-2).contiguous(), v_NV.flatten(-2).contiguous(), g_X.contiguous()
    dy, dv, dg = (torch.empty_like(x) for x in (y, v, g))
    programs = PROGRAMS
    part_PX = g.new_empty(programs, g.shape[-1], dtype=torch.float32)
    given = dout_X.contiguous(), y, v, D_NV.contiguous(), g, dy, dv, dg, part_PX, *_places(g)
    _launch(_residual_backward_kernel, programs, *given, programs, **_tile(g))
    dD_NV = part_PX.sum(0, dtype=D_NV.dtype).view(D_NV.shape)
    return dy.view(y_NV.shape), dv.view(v_NV.shape), dD_NV, dg


def gated_norm(
    x_BTHP: Tensor, z_BTHP: Tensor, weight_HP: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return norm(x) silu(z) in `dtype`, `[B, T, H, P]`; the norm is RMSNorm over P.

    Args:
        x_BTHP: outputs of heads.
        z_BTHP: gate.
        weight_HP: of the norm; heads may share one in memory.
        eps: added to the mean square.
        dtype: of the result.
    """
    out_BTHP = torch.empty(x_BTHP.shape, dtype=dtype, device=x_BTHP.device)
    z_BTX, weight_HP = side_by_side(z_BTHP.flatten(2)), side_by_side(weight_HP)
    how = _head_tile(x_BTHP)
    given = x_BTHP.contiguous(), z_BTX, weight_HP, out_BTHP, *_places(z_BTX)
    blocks = -(-x_BTHP.shape[0] * x_BTHP.shape[1] // how["TOKENS"])
    launch(_norm_kernel, (blocks, len(weight_HP)), *given, weight_HP.stride(0), eps, **how)
    return out_BTHP


@graph_operator("gated_norm_backward")
def gated_norm_backward(
    dout_BTHP: Tensor,
    x_BTHP: Tensor,
    z_BTHP: Tensor,
    weight_HP: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, z and the weight.

    Args:
        dout_BTHP: gradient of the result.
        x_BTHP: outputs of heads.
        z_BTHP: gate.
        weight_HP: of the norm.
        eps: added to the mean square.
        dtype: of the result.
    """
    dx, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (x_BTHP, z_BTHP))
    part_PHP = dx.new_empty(PROGRAMS, *weight_HP.shape, dtype=torch.float32)
    z_BTX, weight_HP = side_by_side(z_BTHP.flatten(2)), side_by_side(weight_HP)
    given = x_BTHP.contiguous(), z_BTX, weight_HP, dx, dz, part_PHP, *_places(z_BTX)
    places = weight_HP.stride(0), eps, PROGRAMS
    how, grid = _head_tile(x_BTHP), (PROGRAMS, len(weight_HP))
    launch(_norm_backward_kernel, grid, dout_BTHP.contiguous(), *given, *places, **how)
    return dx, dz, part_PHP.sum(0, dtype=weight_HP.dtype)


GATES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "decay": (decay, decay_backward),
    "steps": (steps, steps_backward),
    "gated_residual": (gated_residual, gated_residual_backward),
    "gated_norm": (gated_norm, gated_norm_backward),
}


def hidden(gate: Tensor, up: Tensor | None) -> Tensor:
    """Return silu(gate) * up, or relu(gate)^2 without `up`, by the kernel of the experts' units.

    Args:
        gate: `[..., F]`.
        up: `[..., F]`, or None.
    """
    rows = gate.flatten(0, -2), None if up is None else up.flatten(0, -2)
    return weighed_units(*rows).view(gate.shape)


def hidden_backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor | None,
    wants_h: bool = False,
    dgate: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return `hidden` again if it is wanted, and the gradients of gate and up, `[..., F]`.

    Args:
        dh: gradient of the result, `[..., F]`, which is overwritten.
        gate: `[..., F]`.
        up: `[..., F]`, or None.
        wants_h: compute the result again.
        dgate: memory for the gradient of gate, `[..., F]`, strides as `dh`; None: new memory.
    """
    rows = gate.flatten(0, -2), None if up is None else up.flatten(0, -2), None
    if dgate is None:
        grads, h = units_backward(*rows, None, dh.contiguous().flatten(0, -2), wants_h)
    else:
        written = dh.flatten(0, -2), wants_h, dgate.flatten(0, -2)
        grads, h = units_backward(*rows, None, *written)
    found = [None if x is None else x.view(gate.shape) for x in (h, *grads)]
    return found[0], found[1], found[2] if up is not None else None


def linear_backward(
    dy: Tensor, w_DF: Tensor, gate: Tensor, up: Tensor | None, wants_h: bool
) -> tuple[Tensor | None, ...]:
    """Return what `hidden_backward` does for the gradient dy w of `hidden`.

    Gradients of gate and up are halves of one tensor, as joint_gradients.py looks for.

    Args:
        dy: gradient of the product w h, `[..., D]`.
        w_DF: weight, in the dtype of the product.
        gate: `[..., F]`.
        up: `[..., F]`, or None.
        wants_h: compute `hidden` again.
    """
    if up is None or dy.dtype != gate.dtype:
        return hidden_backward((dy @ w_DF).to(gate.dtype), gate, up, wants_h)
    dgate, dh = gate.new_empty(*gate.shape[:-1], 2 * gate.shape[-1]).chunk(2, -1)
    torch.mm(dy.reshape(-1, dy.shape[-1]), w_DF, out=dh.flatten(0, -2))
    return hidden_backward(dh, gate, up, wants_h, dgate)


def _launch(kernel: Any, programs: int, *given: Any, **constants: Any) -> None:
    grid = programs, -(-constants["N"] // constants["BLOCK"])
    launch(kernel, grid, *given, **constants)


def _head_tile(x_BTHP: Tensor) -> dict[str, int]:
    """Return the constants of a launch that takes one head at a time."""
    block = 1 << (x_BTHP.shape[-1] - 1).bit_length()
    return {"N": x_BTHP.shape[-1], "BLOCK": block, "TOKENS": max(1, TILE // block)}


def _alike(a_BTN: Tensor, b_BTN: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the same strides."""
    if a_BTN.stride() == b_BTN.stride() and a_BTN.stride(-1) == 1:
        return a_BTN, b_BTN
    return a_BTN.contiguous(), b_BTN.contiguous()


def _places(x_BTN: Tensor) -> tuple[int, ...]:
    """Return tokens, tokens of a row, and how far rows and tokens are apart."""
    B, T, _ = x_BTN.shape
    return B * T, T, *x_BTN.stride()[:2]


def _tile(x_BTN: Tensor) -> dict[str, int]:
    """Return the constants of a launch."""
    block = min(COLUMNS, 1 << (x_BTN.shape[-1] - 1).bit_length())
    return {"N": x_BTN.shape[-1], "BLOCK": block, "TOKENS": max(1, TILE // block)}


def _steps_tile(dt_BTN: Tensor, bc_BTC: Tensor, width: int) -> dict[str, int]:
    """Return the constants of a launch that takes heads' steps and groups of `width` numbers."""
    tile, block = _tile(dt_BTN), 1 << (width - 1).bit_length()
    groups = {"GROUPS": bc_BTC.shape[-1] // (2 * width), "WIDTH": width, "BLOCK_W": block}
    # Half a tile, of which a backward adds up three weights' gradients.
    return tile | groups | {"TOKENS": max(1, TILE // max(tile["BLOCK"], block) // 2)}


def _blocks(x_BTN: Tensor) -> int:
    """Return the number of tiles."""
    return -(-x_BTN.shape[0] * x_BTN.shape[1] // _tile(x_BTN)["TOKENS"]) if x_BTN.numel() else 0
