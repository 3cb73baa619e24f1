"""Short convolution of one token, as decoding runs it, and token by token: the reference.

Legend: as megacpp/kernels/causal_conv.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacpp.kernels.causal_conv import Activation
from megacpp.model.documents import Documents
from megacpp.torch_extras import wide


def last_inputs(x_BTC: Tensor, taps: int) -> Tensor:
    """Return the last inputs `[B, C, taps]` of a prompt for `causal_conv_step`, zeros in front."""
    short = max(0, taps - x_BTC.shape[1])
    return F.pad(x_BTC[:, x_BTC.shape[1] - taps + short :].mT, (short, 0))


def causal_conv_step(
    x_BC: Tensor,
    taps_BCK1: Tensor,
    weight_C1K: Tensor,
    activation: Activation = "silu",
    dilation: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the output `[B, C]` of one token, and the taps (the last K1 inputs) for the next.

    Args:
        x_BC: the token.
        taps_BCK1: the last K1 = (K - 1) dilation inputs; zeros in front of a document.
        weight_C1K: stored as `nn.Conv1d(groups=C)` stores it.
        activation: of the output.
        dilation: tokens from tap to tap.
    """
    window = torch.cat([taps_BCK1.to(x_BC.dtype), x_BC[..., None]], -1)
    y_BC = (wide(window[..., ::dilation]) * weight_C1K[:, 0].to(x_BC.dtype)).sum(-1).to(x_BC.dtype)
    return y_BC if activation is None else F.silu(y_BC), window[..., 1:]


def causal_conv_sequential(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    docs: Documents | None,
    activation: Activation = "silu",
    dilation: int = 1,
) -> Tensor:
    """Return `causal_conv` token by token, with taps that empty where a document starts: reference.

    Args:
        x_BTC: inputs.
        weight_C1K: stored as `nn.Conv1d(groups=C)` stores it.
        docs: documents; None: one per row.
        activation: of the output.
        dilation: tokens from tap to tap.
    """
    B, T, C = x_BTC.shape
    taps_BCK1 = x_BTC.new_zeros(B, C, (weight_C1K.shape[-1] - 1) * dilation)
    ys_BC = []
    for t in range(T):
        if docs is not None:
            taps_BCK1 = torch.where(docs.starts_BT[:, t, None, None], 0.0, taps_BCK1)
        y_BC, taps_BCK1 = causal_conv_step(x_BTC[:, t], taps_BCK1, weight_C1K, activation, dilation)
        ys_BC.append(y_BC)
    return torch.stack(ys_BC, 1)
