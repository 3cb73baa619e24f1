"""Dense feed-forward (F) as other packages read it; no torch import here.

Letters: F hidden units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import (
    ALL_TOKENS,
    AllocationSettings,
    BlockKind,
    ForeignTensor,
    Parameter,
    copies_weights,
)

if TYPE_CHECKING:
    from megacpp.blocks.dense.module import MLP
    from megacpp.config.schema import CheckpointingPolicy, Config, ModelConfig
    from megacpp.errors import ConfigError
    from megacpp.model.regions import Region


def build(kind: str, model: ModelConfig, layer: int) -> MLP:
    """Return the mixer."""
    from megacpp.blocks.dense.module import MLP

    return MLP(model)


def gated(model: ModelConfig) -> bool:
    """Return whether the activation is SwiGLU, which has a third matrix."""
    return model.mlp.activation == "swiglu"


def squared(model: ModelConfig) -> bool:
    """Squared ReLU has two matrices."""
    return not gated(model)


PARAMETERS = (
    Parameter(("w1.weight",), "[F_tp, D]", "muon", fp8=True, compress=True),
    Parameter(("w3.weight",), "[F_tp, D]", "muon", fp8=True, compress=True, when=gated),
    Parameter(("w2.weight",), "[D, F_tp]", "muon", fp8=True),
)

HF = (
    ForeignTensor("mlp.gate_proj.weight", ("w1.weight",), when=gated),
    ForeignTensor("mlp.up_proj.weight", ("w3.weight",), when=gated),
    ForeignTensor("mlp.up_proj.weight", ("w1.weight",), when=squared),
    ForeignTensor("mlp.down_proj.weight", ("w2.weight",)),
)


def checks(config: Config) -> Iterator[ConfigError]:
    """Yield no errors: every width is legal."""
    return iter(())


def multiply_adds(model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of two or three matrices."""
    return (3 if gated(model) else 2) * model.dim * model.mlp.hidden_dim


def regions(policy: CheckpointingPolicy, model: ModelConfig) -> set[Region]:
    """Recompute regions: gate and up and their product."""
    return {"mlp"} if policy.mlp else set()


def region_multiply_adds(region: Region, model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of gate and up."""
    if region != "mlp":
        return 0.0
    return float((2 if gated(model) else 1) * model.dim * model.mlp.hidden_dim)


DENSE = BlockKind(
    letter="F",
    name="dense feed-forward",
    build=build,
    parameters=PARAMETERS,
    dims=lambda model: {"F": model.mlp.hidden_dim},
    checks=checks,
    tensor_dims=lambda model: {"model.mlp.hidden_dim": model.mlp.hidden_dim},
    layouts=(ALL_TOKENS,),
    multiply_adds=multiply_adds,
    allocations=AllocationSettings(
        "mlp", same=lambda own: (copies_weights(own, 2, 2 * own.config.model.mlp.hidden_dim),)
    ),
    why_eager=lambda mixer: None,
    regions=regions,
    region_multiply_adds=region_multiply_adds,
    whole="fblock",
    hf=HF,
)
