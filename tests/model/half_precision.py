"""Layers with a state in bf16: near the fp32 layer, states wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check_half_precision(layer: Callable[[torch.dtype], Any], autocast: bool) -> None:
    """Six roundings to 8 bits lie on the way of a value; 6 * 2^-8 of the largest bounds them."""
    x = torch.randn(2, 23, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    want: Tensor = layer(torch.float32)(x.float())
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(torch.float32)(x.float())
        assert got.dtype == torch.float32
    else:
        mixer = layer(torch.bfloat16)
        got = mixer(x)
        got.sum().backward()
        assert got.dtype == torch.bfloat16
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in mixer.parameters())
        y, state = mixer.step(x[:, 0], mixer.init_state(2, x.device, x.dtype))
        assert (y.dtype, state.scan.dtype) == (torch.bfloat16, torch.float32)
    assert (got.float() - want).abs().max() <= 6 * 2.0**-8 * want.abs().max()
