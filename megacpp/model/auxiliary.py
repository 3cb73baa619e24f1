"""Losses beside the main one: what their owners share with the accumulation boundary.

An owner makes a loss that is a sum over tokens, hangs it onto a tensor of the main path
(`AttachLoss`) and notes it; the boundary says before each step what a sum is multiplied by, and
afterwards what the mean was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.model.fp32 import Fp32Contract

TERMS = ("balance", "sequence", "z", "indexer", "top", "mtp")
BUFFERS = ("aux_scale", "loss_sums")


class AuxiliarySource(Fp32Contract):
    """A module with losses of its own; its directly owned tensors stay at least fp32.

    Attributes:
        aux_scale: set before the forward of a step to 1 / tokens of the step (all ranks, all
            microbatches): the gradient of every loss, which are sums over tokens.
        loss_sums: for the record, coefficient * loss * T of each of TERMS: sums over the tokens of
            all microbatches since the last `forget`.
        gradient_share: part of the gradient that is this process's, where several make the same
            one and it is added up over them.
        record_share: the same of what is noted.
    """

    aux_scale: Tensor
    loss_sums: Tensor
    gradient_share = 1.0
    record_share = 1.0

    def register_losses(self) -> None:
        """Makes the buffers."""
        self.register_buffer("aux_scale", torch.empty(()), persistent=False)
        self.register_buffer("loss_sums", torch.empty(len(TERMS)), persistent=False)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Those of TERMS that are on."""
        raise NotImplementedError

    @torch.no_grad()
    def record(self, losses: dict[str, Tensor]) -> None:
        """Adds to `loss_sums`."""
        for term, loss in losses.items():
            self.loss_sums[TERMS.index(term)] += loss

    @torch.no_grad()
    def forget(self) -> None:
        """Drops what was recorded."""
        self.loss_sums.zero_()


class AttachLoss(torch.autograd.Function):
    """Identity on `x`; in backward `loss` gets the gradient `scale`.

    So an auxiliary loss trains its owner without being returned to the head: also in a pipeline
    stage that has no head.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.loss_dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grads[0], scale.to(ctx.loss_dtype), None
