"""Losses beside the main one: the interface between their owners and the accumulation boundary.

An owner makes a loss that is a sum over tokens, attaches it to a tensor of the main path
(`AttachLoss`) and records it. The boundary sets the factor of a sum before each step, and reads the
means afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacpp.model.fp32 import Fp32Contract

TERMS = ("balance", "sequence", "z", "indexer", "top", "mtp")
BUFFERS = ("aux_scale", "loss_sums")


class AuxiliarySource(Fp32Contract):
    """Module with losses of its own; its directly owned tensors stay at least fp32.

    Attributes:
        aux_scale: 0-d, set before the forward of a step to 1 / tokens of the step (all ranks, all
            microbatches): the gradient of every loss, which are sums over tokens.
        loss_sums: `[len(TERMS)]`, coefficient * loss * T of each of TERMS: sums over the tokens of
            all microbatches since the last `forget`.
        gradient_share: this process's part of the gradient, where several processes compute the
            same one and it is summed over them.
        record_share: this process's part of `loss_sums`, likewise.
        of_vocabulary: each process that has some of the words computes its whole losses.
    """

    aux_scale: Tensor
    loss_sums: Tensor
    gradient_share = 1.0
    record_share = 1.0
    of_vocabulary = False

    def register_losses(self) -> None:
        """Register the buffers `aux_scale` and `loss_sums`."""
        self.register_buffer("aux_scale", torch.empty(()), persistent=False)
        self.register_buffer("loss_sums", torch.empty(len(TERMS)), persistent=False)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Names of TERMS whose losses are on."""
        raise NotImplementedError

    @torch.no_grad()
    def record(self, losses: dict[str, Tensor]) -> None:
        """Add losses, 0-d sums by name, to `loss_sums`."""
        for term, loss in losses.items():
            self.loss_sums[TERMS.index(term)].add_(loss)

    def weigh(self, tokens: int, valid_K: Tensor, step: int, steps: int) -> None:
        """Set factors of an optimizer step beside `aux_scale`; most losses have none.

        Args:
            tokens, valid_K: tokens of all ranks, and their labels 1 to K tokens further ahead.
            step, steps: number of the step, and of all of the run.
        """

    @torch.no_grad()
    def forget(self) -> None:
        """Zero `loss_sums`."""
        self.loss_sums.zero_()


class AttachLoss(torch.autograd.Function):
    """Identity on `x`; in backward `loss` gets the gradient `scale`.

    So an auxiliary loss trains its owner without being returned to the head: also in a pipeline
    stage that has no head.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        """Return `x` unchanged.

        Args:
            ctx: autograd's context.
            x: `[...]`, any shape.
            loss: 0-d, a sum over tokens.
            scale: 0-d, the gradient that `loss` gets.
        """
        ctx.save_for_backward(scale)
        ctx.loss_dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x, loss and scale."""
        (scale,) = ctx.saved_tensors
        return grads[0], scale.to(ctx.loss_dtype), None
