"""Rotary frequencies stretched to longer contexts: YaRN's way, or Llama 3.1's.

Legend: P pairs of a head. Sources: YaRN (arXiv 2309.00071) with the choices of DeepSeek-V3
(arXiv 2412.19437); transformers' `rope_type` llama3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megacpp.blocks.attention.config import YarnConfig


def stretched(frequency_P: Tensor, dim: int, theta: float, yarn: YarnConfig) -> Tensor:
    """Return frequencies `[P]`, divided by the factor the more, the fewer turns they make.

    Args:
        frequency_P: radians per position of each pair.
        dim: rotated dims of a head, 2 P.
        theta: base of the frequencies.
        yarn: settings.
    """
    if yarn.ramp == "turns":
        turns_P = frequency_P * (yarn.original_seq_len / (2.0 * math.pi))
        slow_P = (yarn.beta_fast - turns_P) / (yarn.beta_fast - yarn.beta_slow)
    else:
        first = max(math.floor(_pair_that_turns(yarn.beta_fast, dim, theta, yarn)), 0)
        last = min(math.ceil(_pair_that_turns(yarn.beta_slow, dim, theta, yarn)), dim - 1)
        width = (last - first) or 1e-3  # as upstream: a step instead of a division by zero
        pair_P = torch.arange(dim // 2, dtype=torch.float64, device=frequency_P.device)
        slow_P = (pair_P - first) / width
    slow_P = slow_P.clamp(0.0, 1.0)  # 0: turns often, kept as it is
    return frequency_P * (1.0 - slow_P) + frequency_P / yarn.factor * slow_P


def _pair_that_turns(turns: float, dim: int, theta: float, yarn: YarnConfig) -> float:
    """Return the (fractional) pair that makes `turns` full turns within the original context."""
    length = yarn.original_seq_len / (turns * 2.0 * math.pi)
    return dim * math.log(length) / (2.0 * math.log(theta))
