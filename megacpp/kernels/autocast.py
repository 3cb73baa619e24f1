"""What autocast makes of a tensor before a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives `x`, or None when it leaves it alone."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)
