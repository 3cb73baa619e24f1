"""Gate of a memory in a residual stream: from how well its key matches the stream.

Legend: tensors are `(..., D)` or `(..., S, D)`: S residual streams, D model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megacpp.torch_extras import once_differentiable, wide

LEAST = 1e-6  # of |s| under the root, whose slope would grow without bound


def memory_gate(
    key_SD: Tensor, value_D: Tensor, x_SD: Tensor, key_norm_SD: Tensor, x_norm_SD: Tensor
) -> Tensor:
    """Return gate * value, `[..., S, D]` in the dtype of `value_D`: one value for all streams.

        s = <RMS(key), RMS(x)> / sqrt(D)      gate = sigmoid(sgn(s) sqrt(max(|s|, 1e-6)))

    Each norm has a weight per stream, and the eps of the source: that of the dtype
    (`nn.RMSNorm`'s default), here at least fp32. Computed in at least fp32; saves key, value and x
    as they are for backward, and three numbers per token and stream.

    Args:
        key_SD: key of each stream.
        value_D: value.
        x_SD: residual streams.
        key_norm_SD: weights of the keys' norm.
        x_norm_SD: weights of the streams' norm.
    """
    return _MemoryGate.apply(  # type: ignore[return-value]
        key_SD, value_D, x_SD, key_norm_SD, x_norm_SD
    )


def memory_gate_reference(
    key_SD: Tensor, value_D: Tensor, x_SD: Tensor, key_norm_SD: Tensor, x_norm_SD: Tensor
) -> Tensor:
    """Return `memory_gate` by torch's own operators: the definition.

    Args:
        key_SD: key of each stream.
        value_D: value.
        x_SD: residual streams.
        key_norm_SD: weights of the keys' norm.
        x_norm_SD: weights of the streams' norm.
    """
    key, x = (wide(t) for t in (key_SD, x_SD))
    width, eps = key.shape[-1], torch.finfo(key.dtype).eps
    key = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + eps) * key_norm_SD
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * x_norm_SD
    s = (key * x).sum(-1, keepdim=True) / math.sqrt(width)
    gate = torch.sigmoid(s.sign() * s.abs().clamp_min(LEAST).sqrt())
    return (gate * wide(value_D)[..., None, :]).to(value_D.dtype)


class _MemoryGate(torch.autograd.Function):
    """Gate with a backward by hand.

    With unit vectors k and x of mean square 1 and w the product of both norms' weights:
    ds/dk = x w / sqrt(D), and through the norm dkey = ds rstd (x w / sqrt(D) - k s / D).
    """

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, x: Tensor, key_norm: Tensor, x_norm: Tensor
    ) -> Tensor:
        key_rstd, x_rstd = _rstd(key), _rstd(x)
        s = _meet(key, key_rstd, x, x_rstd, key_norm * x_norm)
        ctx.save_for_backward(key, value, x, key_norm, x_norm, key_rstd, x_rstd, s)
        return (_gate(s)[0] * value[..., None, :]).to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        key, value, x, key_norm, x_norm, key_rstd, x_rstd, s = ctx.saved_tensors
        width, dout = key.shape[-1], wide(grads[0])
        gate, slope = _gate(s)
        dvalue = (dout * gate).sum(-2).to(value.dtype)
        ds = (dout * value[..., None, :]).sum(-1, keepdim=True).mul_(slope)
        del dout
        root, weight = math.sqrt(width), key_norm * x_norm
        key_unit, x_unit = wide(key) * key_rstd, wide(x) * x_rstd
        both = (key_unit * x_unit).mul_(ds).flatten(0, -3).sum(0).div_(root)
        along = s / width
        dkey = (x_unit * (weight / root)).addcmul_(key_unit, along, value=-1.0)
        dkey = dkey.mul_(ds * key_rstd).to(key.dtype)
        dx = key_unit.mul_(weight / root).addcmul_(x_unit, along, value=-1.0)
        dx = dx.mul_(ds * x_rstd).to(x.dtype)
        return dkey, dvalue, dx, both * x_norm, both * key_norm


def _rstd(x: Tensor) -> Tensor:
    x = wide(x)
    return x.square().mean(-1, keepdim=True).add_(torch.finfo(x.dtype).eps).rsqrt_()


def _meet(key: Tensor, key_rstd: Tensor, x: Tensor, x_rstd: Tensor, weight: Tensor) -> Tensor:
    """Return <RMS(key), RMS(x)> / sqrt(D), `[..., S, 1]`."""
    units = (wide(key) * key_rstd).mul_(wide(x) * x_rstd)
    return units.mul_(weight).sum(-1, keepdim=True).div_(math.sqrt(key.shape[-1]))


def _gate(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate, and its slope by s: none where |s| is held at LEAST."""
    root = s.abs().clamp_min(LEAST).sqrt()
    gate = torch.sigmoid(s.sign() * root)
    slope = gate * (1.0 - gate) / (2.0 * root)
    return gate, torch.where(s.abs() >= LEAST, slope, 0.0)
