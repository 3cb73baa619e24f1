"""Dtype of a tensor before a matrix product under autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives `x`, of any shape, or None when it leaves it alone."""
    device = x.device.type
    # Not torch.amp.is_autocast_available: the compiler of torch 2.11 can't look into it. Of the
    # devices that tensors have here only `meta` knows no autocast.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)
