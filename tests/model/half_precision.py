"""Layers with a state in bf16: near the fp32 layer, states wide."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def check_half_precision(
    layer: Callable[[torch.dtype], nn.Module], autocast: bool, state: str
) -> None:
    """Six roundings to 8 bits lie on the way of a value; 6 * 2^-8 of the largest bounds them.

    Args:
        layer: makes the layer, of 20 dims, in a dtype.
        autocast: of the fp32 layer, in place of narrow weights.
        state: name of the state's matrix.
    """
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
        empty = mixer.init_state(2, x.device, x.dtype)
        assert getattr(empty, state).dtype == torch.float32
        assert mixer.step(x[:, 0], empty)[0].dtype == torch.bfloat16
    assert (got.float() - want).abs().max() <= 6 * 2.0**-8 * want.abs().max()
