"""The weight of a depthwise causal convolution: a few taps for every channel."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megacpp.model.init import Rule, Uniform


class ShortConv(nn.Module):
    """Weight `[channels, 1, taps]`, as `nn.Conv1d` with as many groups stores it.

    The mixer that owns it convolves (megacpp/kernels/causal_conv.py), some channels at a time.
    """

    def __init__(self, num_channels: int, num_taps: int) -> None:
        super().__init__()
        self.num_channels, self.num_taps = num_channels, num_taps
        self.weight = nn.Parameter(torch.empty(num_channels, 1, num_taps))

    def rule(self) -> Rule:
        """How the weight starts: uniform, with the bound of `nn.Conv1d`."""
        bound = 1 / math.sqrt(self.num_taps)
        return Uniform(-bound, bound)


def stacked(*convs: ShortConv) -> Tensor:
    """One weight for the channels of all of them: a few numbers each, cheaper than more calls."""
    return torch.cat([conv.weight for conv in convs])
