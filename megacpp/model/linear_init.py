"""Initial values of the linear layers of a block: one rule into the block, one out of it."""

from __future__ import annotations

import math

from megacpp.config.schema import ModelConfig
from megacpp.model.init import Normal


def input_rule(config: ModelConfig) -> Normal:
    """Return Normal(init_std), for projections of the (normed) residual stream or hidden values."""
    return Normal(config.init_std)


def output_rule(config: ModelConfig) -> Normal:
    """Return Normal(init_std / sqrt(2 depth)), for projections into the residual stream.

    The stream is a sum over layers, so its variance would grow with depth; smaller writers keep
    it about constant (GPT-2, Radford et al. 2019).
    """
    return Normal(config.init_std / math.sqrt(2 * config.depth))
