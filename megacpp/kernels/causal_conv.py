"""Depthwise causal convolution over a row of packed documents, with an optional SiLU.

Legend: B rows, T tokens of a row, C channels, K taps (weight[..., K-1] meets the current token);
a suffix K1 is (K - 1) * dilation past tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.model.documents import Documents
from megacpp.torch_extras import once_differentiable, wide

Activation = Literal["silu"] | None


def causal_conv(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    docs: Documents | None,
    activation: Activation = "silu",
    dilation: int = 1,
    backend: str = "torch",
) -> Tensor:
    """Return act(sum_j weight[K-1-j] * x[t - j dilation]) over the tokens of t's own document.

    Sums in at least fp32 and saves only `x_BTC` for backward.

    Args:
        x_BTC: inputs; the output has their shape and dtype.
        weight_C1K: stored as `nn.Conv1d(groups=C)` stores it.
        docs: documents; None: one per row.
        activation: act.
        dilation: tokens from tap to tap.
        backend: of `short_conv` (megacpp/kernels/selection.py); a compiler takes torch's forward.
    """
    num_taps = weight_C1K.shape[-1]
    if backend == "reference":
        from megacpp.kernels.causal_conv_steps import causal_conv_sequential

        return causal_conv_sequential(x_BTC, weight_C1K, docs, activation, dilation)
    if backend == "triton" and not torch.compiler.is_compiling():
        from megacpp.kernels import triton_causal_conv

        return triton_causal_conv.causal_conv(x_BTC, weight_C1K, docs, activation, dilation)
    keep = None if docs is None or docs.whole else reach(docs, num_taps, dilation)
    positions = (None if keep is None or docs is None else docs.positions_BT,)
    how = keep, activation, dilation, positions if backend == "triton" else ()
    return _CausalConv.apply(x_BTC, weight_C1K, *how)  # type: ignore[return-value]


class _CausalConv(torch.autograd.Function):
    """Convolution by K shifted multiply-adds, with a backward by hand.

    Autograd would save every masked shift of x, and the argument of the activation: the backward
    adds that up again. In a compiled graph it may be Triton's, which is given `kernel`, the tokens'
    positions in their documents.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        weight_C1K: Tensor,
        keep: list[Tensor] | None,
        activation: Activation,
        dilation: int,
        kernel: tuple[Tensor | None, ...],
    ) -> Tensor:
        ctx.save_for_backward(x_BTC, weight_C1K)
        ctx.kernel = kernel
        ctx.keep, ctx.activation, ctx.dilation = keep, activation, dilation
        y_BTC = _summed(x_BTC, _taps(weight_C1K, x_BTC), keep, dilation)
        return y_BTC if activation is None else F.silu(y_BTC, inplace=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_C1K = ctx.saved_tensors
        if ctx.kernel:
            from megacpp.kernels import triton_causal_conv

            (positions_BT,), silu = ctx.kernel, ctx.activation is not None
            given = grads[0], x_BTC, weight_C1K, positions_BT, silu, ctx.dilation
            return *triton_causal_conv.backward(*given), None, None, None, None
        weight_KC, dy_BTC = _taps(weight_C1K, x_BTC), grads[0]
        if ctx.activation is not None:
            y_BTC = _summed(x_BTC, weight_KC, ctx.keep, ctx.dilation)
            dy_BTC = torch.ops.aten.silu_backward(dy_BTC, y_BTC)
        dx_BTC = dy_BTC * weight_KC[-1]
        reached = _reach(x_BTC, weight_KC, ctx.dilation)
        dy_BTC = wide(dy_BTC)  # once, not in each product
        rows_C = [(x_BTC * dy_BTC).sum((0, 1))]
        for j in range(1, reached):
            lag = j * ctx.dilation
            dlater_BTC = _masked(dy_BTC[:, lag:], ctx.keep, j)
            dx_BTC = _plus(dx_BTC, dlater_BTC, weight_KC[-1 - j], -lag)
            rows_C.append((x_BTC[:, :-lag] * dlater_BTC).sum((0, 1)))
        rows_C += [torch.zeros_like(rows_C[0])] * (len(weight_KC) - reached)
        dweight_C1K = torch.stack(rows_C[::-1], 1)[:, None].to(weight_C1K.dtype)
        return dx_BTC.to(x_BTC.dtype), dweight_C1K, None, None, None, None


def _taps(weight_C1K: Tensor, x_BTC: Tensor) -> Tensor:
    """Return the weight in the dtype of the sums, `[K, C]`: channels side by side, as in x."""
    weight_KC = weight_C1K[:, 0].t()
    # Narrow at first, as FSDP2 gathers it.
    narrow_KC = weight_KC.to(x_BTC.dtype, memory_format=torch.contiguous_format)
    return wide(narrow_KC).contiguous()


def _summed(x_BTC: Tensor, weight_KC: Tensor, keep: list[Tensor] | None, dilation: int) -> Tensor:
    """Return the convolution before its activation, in the dtype of `x_BTC`."""
    y_BTC = x_BTC * weight_KC[-1]
    for j in range(1, _reach(x_BTC, weight_KC, dilation)):
        lag = j * dilation
        past_BTC = _masked(x_BTC[:, :-lag], keep, j)
        y_BTC = _plus(y_BTC, past_BTC, weight_KC[-1 - j], lag)
    return y_BTC.to(x_BTC.dtype)


def _plus(sum_BTC: Tensor, part_BTC: Tensor, weight_C: Tensor, lag: int) -> Tensor:
    """Return the sum plus a part times its weight, `lag` tokens later, or -lag earlier."""
    if torch.compiler.is_compiling():  # one kernel of all taps: nothing is written in place
        return sum_BTC + F.pad(part_BTC * weight_C, (0, 0, max(lag, 0), max(-lag, 0)))
    (sum_BTC[:, lag:] if lag > 0 else sum_BTC[:, :lag]).addcmul_(part_BTC, weight_C)
    return sum_BTC


def reach(docs: Documents, num_taps: int, dilation: int = 1) -> list[Tensor]:
    """Return for each lag j the tokens t >= j whose document holds t - j, [B, T-j, 1]."""
    lags = range(0, num_taps * dilation, dilation)
    return docs.memo(
        ("causal_conv", num_taps, dilation),
        lambda: [docs.positions_BT[:, lag:, None] >= lag for lag in lags],
    )


def _masked(x_BTC: Tensor, keep: list[Tensor] | None, tap: int) -> Tensor:
    # where, not a product: a NaN of another document times zero would still be a NaN.
    return x_BTC if keep is None else torch.where(keep[tap], x_BTC, 0.0)


def _reach(x_BTC: Tensor, weight_KC: Tensor, dilation: int) -> int:
    """Taps worth visiting: a row shorter than the kernel has no further past."""
    return min(weight_KC.shape[0], (x_BTC.shape[1] - 1) // dilation + 1)
