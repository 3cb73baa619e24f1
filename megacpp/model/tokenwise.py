"""Mixers in which tokens don't meet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacpp.model.documents import Documents


class Tokenwise(nn.Module):
    """Base of mixers that treat each token by itself: decoding has no state."""

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        """Return None: the block has no state."""
        return None

    def prefill(self, x_BTD: Tensor, docs: Documents) -> tuple[Tensor, None]:
        """Return the output `[B, T, D]` of a prompt, as `step` gives it, and None."""
        return self.step(x_BTD.flatten(0, 1), None)[0].view_as(x_BTD), None

    def step(self, x_BD: Tensor, state: None) -> tuple[Tensor, None]:
        """Return the output `[B, D]` of one token, and None."""
        return self(x_BD), None
