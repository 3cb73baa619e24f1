"""Initial values of G blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp.blocks.gated_deltanet.descriptor import GATED_DELTANET
from megacpp.model.init import Constant, LogUniform, Rule, TimeStepBias
from megacpp.model.linear_init import input_rule, output_rule

if TYPE_CHECKING:
    from megacpp.blocks.gated_deltanet.module import GatedDeltaNet


def gated_deltanet_rules(mixer: GatedDeltaNet) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the mixer."""
    into = input_rule(mixer.config)
    rules: dict[str, Rule] = {
        **{name: into for name in GATED_DELTANET.rows(mixer.config) if name.startswith("in_")},
        "out_proj.weight": output_rule(mixer.config),
        "A_log": LogUniform(0.0, 16.0),
        "dt_bias": TimeStepBias(1e-3, 0.1, 1e-4),
        "norm.weight": Constant(1.0),
    }
    return rules | {f"{name}.weight": conv.rule() for name, conv in mixer.short_convs().items()}
