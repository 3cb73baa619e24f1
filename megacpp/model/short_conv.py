"""Short depthwise causal convolutions: the weight, and the submodule that convolves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megacpp.kernels.backend import PLAIN_KERNELS, Kernels
from megacpp.kernels.causal_conv import causal_conv
from megacpp.model.documents import Documents
from megacpp.model.init import Rule, Uniform
from megacpp.model.recompute import PLAIN, Recompute
from megacpp.model.regions import Region


class ShortConv(nn.Module):
    """Weight `[channels, 1, taps]`, as `nn.Conv1d` with as many groups stores it.

    The mixer that owns it convolves by `Convolve`, some channels at a time.
    """

    def __init__(self, num_channels: int, num_taps: int) -> None:
        super().__init__()
        self.num_channels, self.num_taps = num_channels, num_taps
        self.weight = nn.Parameter(torch.empty(num_channels, 1, num_taps))

    def rule(self) -> Rule:
        """Return the rule of the weight: uniform, with the bound of `nn.Conv1d`."""
        bound = 1 / math.sqrt(self.num_taps)
        return Uniform(-bound, bound)


def stacked(*convs: ShortConv) -> Tensor:
    """Return the weights of all convolutions as one `[C, 1, K]`, for a single call."""
    return torch.cat([conv.weight for conv in convs])


class Convolve(nn.Module):
    """Short convolution and SiLU of some channels; it looks (taps - 1) * dilation tokens back.

    Args:
        region: what checkpointing calls it, as it may run again in backward.
        dilation: tokens from tap to tap.
    """

    recompute: Recompute = PLAIN
    kernels: Kernels = PLAIN_KERNELS

    def __init__(self, region: Region = "conv_bc", dilation: int = 1) -> None:
        super().__init__()
        self.region: Region = region
        self.dilation = dilation

    def forward(self, x_BTC: Tensor, weight_C1K: Tensor, docs: Documents | None) -> Tensor:
        """Return the causal convolution `[B, T, C]` of `x_BTC` within documents, through SiLU."""
        how = "silu", self.dilation, self.kernels.short_conv
        return self.recompute(self.region, causal_conv, x_BTC, weight_C1K, docs, *how)
