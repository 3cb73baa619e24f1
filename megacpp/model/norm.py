"""Norms with their weights under the fp32 contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.rms_norm import rms_norm
from megacpp.model.fp32 import Fp32Contract
from megacpp.model.init import Constant, Rule


class RMSNorm(Fp32Contract):
    """Norm x / rms(x) * weight over the last dim, computed in fp32 (arXiv 1910.07467).

    Input and output `(..., dim)` in the dtype of `x`; under autocast the output in its dtype.
    """

    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, beside: bool = False) -> Any:
        """Return the RMS norm of `x` `[..., dim]`, in its dtype; with `beside` and x, a pair."""
        return rms_norm(x, self.weight, self.eps, self.kernels.rms_norm, beside)

    def init_rules(self) -> dict[str, Rule]:
        """Return the rule of the weight: ones."""
        return {"weight": Constant(1.0)}


class NormOverHeads(RMSNorm):
    """RMSNorm over all heads at once; ranks that hold some of them put theirs in `over_ranks`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.over_ranks: nn.Module | None = None

    def forward(self, x: Tensor, beside: bool = False) -> Any:
        """Return the RMS norm of `x` `[..., dim]` over all heads; with `beside` and x, a pair."""
        if self.over_ranks is None:
            return super().forward(x, beside)
        y = self.over_ranks(x, self.weight, self.eps)
        return (y, x) if beside else y
