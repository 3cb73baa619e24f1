"""Residual layer: x + mixer(norm(x)) or x + norm(mixer(x)), the mixer that its letter names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacpp.blocks.engram.module import Engram
from megacpp.blocks.hyper_connections.module import HyperConnection
from megacpp.blocks.kinds import KINDS
from megacpp.config.schema import ModelConfig
from megacpp.model.documents import Documents
from megacpp.model.init_rules import block_rules
from megacpp.model.norm import RMSNorm
from megacpp.model.recompute import PLAIN, Recompute


class Block(nn.Module):
    """Residual block with its norm before or behind the mixer, `[B, T, D]` to `[B, T, D]`.

    With hyper-connections streams `[B, T, n, D]` go in and come out, and what the mixer returns may
    run again without them (megacpp/blocks/hyper_connections/module.py).
    """

    init_rules = block_rules
    recompute: Recompute = PLAIN

    def __init__(self, kind: str, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.letter, self.kind, self.layer = kind[0], kind, layer
        remembers = "+engram" in kind
        self.engram = Engram(config, layer, config.mhc.streams) if remembers else None
        self.norm, self.post_norm = RMSNorm(config.dim, config.norm_eps), config.post_norm
        # Any: nn.Module declares none of forward(x, docs), init_state, step and init_rules.
        self.mixer: Any = KINDS[self.letter].build(kind, config, layer)
        several = config.mhc.streams > 1
        self.connection = HyperConnection(config, layer) if several else None

    def forward(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """Return the residual stream behind the layer, `[B, T, D]`.

        With hyper-connections the stream is `[B, T, n, D]`, before and behind.
        """
        region = "block" if self.connection is None else "connected"
        return self.recompute(region, self._forward, x_BTD, docs)

    def _forward(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        if self.engram is not None:
            x_BTD = self.recompute("engram", torch.add, x_BTD, self.engram(x_BTD, docs))
        if self.connection is None and self.post_norm:
            return x_BTD + self._mixed(x_BTD, docs)
        if self.connection is None:
            normed_BTD, x_BTD = self.recompute("norm", self.norm, x_BTD, True)
            return x_BTD + self.mixer(normed_BTD, docs)
        u_BTD, *coefficients = self.recompute("read_streams", self.connection.read, x_BTD)
        y_BTD = self.recompute("block", self._mixed, u_BTD, docs)
        return self.recompute("mix_streams", self.connection.mix, x_BTD, y_BTD, *coefficients)

    def _mixed(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """Return the mixer's output, which is added to the stream, `[B, T, D]`."""
        if self.post_norm:
            return self.recompute("norm", self.norm, self.mixer(x_BTD, docs))
        return self.mixer(self.recompute("norm", self.norm, x_BTD), docs)
