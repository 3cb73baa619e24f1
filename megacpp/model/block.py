"""One residual layer: x + mixer(norm(x)), with the mixer that its letter names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacpp.config import ModelConfig
from megacpp.model.attention import GroupedQueryAttention
from megacpp.model.documents import Documents
from megacpp.model.init import Rule
from megacpp.model.m2rnn import M2RNN
from megacpp.model.mamba3 import Mamba3
from megacpp.model.mla import MultiHeadLatentAttention
from megacpp.model.mlp import MLP
from megacpp.model.moe import MixtureOfExperts
from megacpp.model.norm import RMSNorm
from megacpp.model.seam import PLAIN, Seam

Mixer = GroupedQueryAttention | MultiHeadLatentAttention | Mamba3 | M2RNN | MixtureOfExperts | MLP


def build_mixer(kind: str, config: ModelConfig) -> Mixer:
    """The mixer of a kind of layer (see `layer_kinds` in megacpp/model/pattern.py)."""
    letter = kind[0]
    if letter == "A":
        mla = config.attention.kind == "mla"
        return MultiHeadLatentAttention(config) if mla else GroupedQueryAttention(config)
    if letter == "M":
        return Mamba3(config)
    if letter == "E":
        return MixtureOfExperts(config)
    if letter == "R":
        return M2RNN(config)
    assert letter == "F", letter
    return MLP(config)


class Block(nn.Module):
    """Pre-norm residual block, `[B, T, D]` to `[B, T, D]`."""

    seam: Seam = PLAIN

    def __init__(self, kind: str, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.letter, self.kind, self.layer = kind[0], kind, layer
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.mixer: Mixer = build_mixer(kind, config)

    def forward(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        return self.seam("block", self._forward, x_BTD, docs)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Decoding state of `batch` empty sequences."""
        return self.mixer.init_state(batch, device, dtype)

    def step(self, x_BD: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token: output `[B, D]` and the next state."""
        y_BD, state = self.mixer.step(self.norm(x_BD), state)
        return x_BD + y_BD, state

    def init_rules(self) -> dict[str, Rule]:
        mixer = {f"mixer.{name}": rule for name, rule in self.mixer.init_rules().items()}
        return {"norm.weight": self.norm.init_rules()["weight"], **mixer}

    def _forward(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        return x_BTD + self._mixed(x_BTD, docs)

    def _mixed(self, x_BTD: Tensor, docs: Documents) -> Tensor:
        """What is added to the stream."""
        return self.mixer(self.seam("norm", self.norm, x_BTD), docs)
