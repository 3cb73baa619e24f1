"""Settings of the model: its width, its pattern, a section for each block kind; no torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from megacpp.blocks.attention.config import AttentionConfig
from megacpp.blocks.dense.config import MLPConfig
from megacpp.blocks.engram.config import EngramConfig
from megacpp.blocks.experts.config import MoEConfig
from megacpp.blocks.gated_deltanet.config import GatedDeltaNetConfig
from megacpp.blocks.hyper_connections.config import HyperConnectionConfig
from megacpp.blocks.m2rnn.config import M2RNNConfig
from megacpp.blocks.mamba3.config import Mamba3Config
from megacpp.blocks.mtp.config import MTPConfig
from megacpp.blocks.ngram.config import NgramConfig
from megacpp.blocks.top.config import TOPConfig
from megacpp.config.settings import WIDEST, setting


@dataclass(frozen=True)
class ModelConfig:
    """Hybrid model: `pattern` letters (A M E R G F) tiled to `depth`; `|` marks pipeline cuts."""

    dim: int = setting(256, "Width of the model.", "dims", at_least=1, at_most=1 << 20)
    depth: int = setting(
        12, "Number of layers, one block each.", "layers", at_least=1, at_most=1024
    )
    pattern: str = setting(
        "AEMEAEMEAEMR", "Block letters A M E R G F, tiled to the depth; | cuts pipeline stages."
    )
    vocab_size: int = setting(
        4096, "Rows of the embedding and of the head.", "ids", at_least=2, at_most=WIDEST
    )
    tie_embeddings: bool = setting(False, "Use one matrix for embedding and head.")
    norm_eps: float = setting(1e-5, "Epsilon of every RMS norm.", above=0)
    post_norm: bool = setting(False, "Norm what a block's mixer returns, not what it is given.")
    logit_softcap: float | None = setting(
        None, "Soft cap (tanh) on the head's logits (none: off).", above=0
    )
    z_loss: float = setting(0.0, "Weight of the head's z-loss (0: off).", at_least=0)
    init_std: float = setting(0.02, "Standard deviation of initial weights.", at_least=0)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mamba3: Mamba3Config = field(default_factory=Mamba3Config)
    m2rnn: M2RNNConfig = field(default_factory=M2RNNConfig)
    gated_deltanet: GatedDeltaNetConfig = field(default_factory=GatedDeltaNetConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    top: TOPConfig = field(default_factory=TOPConfig)
    ngram: NgramConfig = field(default_factory=NgramConfig)
    engram: EngramConfig = field(default_factory=EngramConfig)
    mhc: HyperConnectionConfig = field(default_factory=HyperConnectionConfig)

    @property
    def stream_dims(self) -> tuple[int, ...]:
        """Shape of a token between two layers: `(dim,)`, with several streams `(streams, dim)`."""
        streams = self.mhc.streams
        return (streams, self.dim) if streams > 1 else (self.dim,)

    @property
    def stream_width(self) -> int:
        """Numbers of a token between two layers, in all residual streams."""
        return self.mhc.streams * self.dim

    @property
    def needs_full_row(self) -> bool:
        """Whether a part of the model reads tokens of a row beside its own."""
        return bool(self.mtp.depths or self.top.loss or self.ngram.heads or self.engram.layers)
