"""Carry from chunk to chunk of a row, as one operator however many chunks there are.

A loop over chunks outside of an operator would be copied into a compiled graph chunk by chunk: at
4,096 tokens a Mamba-3 block had thousands of nodes, and took minutes to compile.

Legend: B rows, H heads, J chunks of a row, X whatever is carried of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@torch.library.custom_op("megacpp::carry", mutates_args=())
def carry(added_BHJX: Tensor, keep_BHJ: Tensor, first_BHX: Tensor, backwards: bool) -> Tensor:
    """Return all s `[B, H, J + 1, ...]`: s[0] = first, s[j+1] = keep[j] s[j] + added[j].

    Args:
        added_BHJX: what each chunk adds.
        keep_BHJ: factor of each chunk; may broadcast.
        first_BHX: state that enters; s has its dtype.
        backwards: s[J] = first, s[j] = keep[j] s[j+1] + added[j].
    """
    B, H, J, *rest = added_BHJX.shape
    s = first_BHX.new_empty(B, H, J + 1, *rest)
    from_, to, order = (1, 0, reversed(range(J))) if backwards else (0, 1, range(J))
    s[:, :, J if backwards else 0] = first_BHX
    s[:, :, to : to + J] = added_BHJX
    keep = keep_BHJ[(..., *[None] * len(rest))]
    for j in order:
        s[:, :, j + to].addcmul_(keep[:, :, j], s[:, :, j + from_])
    return s


@carry.register_fake
def _(added_BHJX: Tensor, keep_BHJ: Tensor, first_BHX: Tensor, backwards: bool) -> Tensor:
    B, H, J, *rest = added_BHJX.shape
    return first_BHX.new_empty(B, H, J + 1, *rest)


def carried_sum(total_BHJA: Tensor, passes_BJ: Tensor, first_BHA: Tensor | None) -> Tensor:
    """Return the sum that enters each chunk, when chunk j adds `total` to what `passes` through it.

    In fp64: the angle of a long document grows to thousands of radians, and only its remainder
    modulo 2 pi matters.
    """
    if first_BHA is None:
        first_BHA = torch.zeros_like(total_BHJA[:, :, 0])
    return _CarriedSum.apply(total_BHJA, passes_BJ, first_BHA)  # type: ignore[return-value]


class _CarriedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, passes_BJ: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(passes_BJ)  # of the documents, so every layer keeps the same one
        ctx.dtypes = total.dtype, first.dtype
        return carry(total[:, :, :-1], _kept(passes_BJ), first.double(), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        (passes_BJ,), (of_total, of_first) = ctx.saved_tensors, ctx.dtypes
        d = carry(grads[0][:, :, :-1], _kept(passes_BJ), grads[0][:, :, -1], True)
        dtotal = torch.nn.functional.pad(d[:, :, 1:], (0, 0, 0, 1))  # the last goes nowhere
        return dtotal.to(of_total), None, d[:, :, 0].to(of_first)


def _kept(passes_BJ: Tensor) -> Tensor:
    """Return 1 where a sum carries over, else 0, `[B, 1, J - 1]`: the last chunk precedes none."""
    return passes_BJ[:, None, :-1].double()
