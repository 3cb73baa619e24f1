"""Multi-token prediction as numbers: its block's settings, weights of depths; no torch import."""

from __future__ import annotations

from dataclasses import replace

from megacpp.blocks.mtp.config import MTPConfig
from megacpp.config.schema import ModelConfig
from megacpp.model.pattern import with_kinds

LETTERS = "AF"  # mixers of a block, in order
WIDTH_MULTIPLE = 16  # of hidden units, where their number isn't set


def block_model(model: ModelConfig) -> ModelConfig:
    """Return a model whose A and F blocks are those of multi-token prediction: plain ones.

    The depth stays, so that projections into the residual stream start as small as elsewhere.
    """
    return replace(
        with_kinds(model, LETTERS),
        depth=model.depth,
        mlp=replace(model.mlp, hidden_dim=hidden_width(model)),
        mhc=ModelConfig().mhc,
    )


def hidden_width(model: ModelConfig) -> int:
    """Hidden units of its feed-forward: as given, or 4 * dim, of three matrices two thirds."""
    if model.mtp.hidden_dim:
        return model.mtp.hidden_dim
    units = 4 * model.dim * (2 if model.mlp.activation == "swiglu" else 3) // 3
    return -(-units // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def num_blocks(mtp: MTPConfig) -> int:
    """Blocks with weights of their own."""
    return min(1, mtp.depths) if mtp.shared else mtp.depths


def depth_weights(mtp: MTPConfig) -> list[float]:
    """Return the weight of each depth: beta^k, normalised to a sum of 1."""
    powers = [mtp.beta**k for k in range(mtp.depths)]
    return [power / sum(powers) for power in powers]


def coefficient(mtp: MTPConfig, step: int, steps: int) -> float:
    """Return the loss weight of the mean over depths in step `step` (the first is 0) of `steps`."""
    return mtp.loss if step < mtp.switch * steps else mtp.loss_final
