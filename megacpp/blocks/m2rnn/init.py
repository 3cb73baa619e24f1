"""Initial values of R blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp.blocks.m2rnn.descriptor import M2RNN_KIND
from megacpp.model.init import Constant, Identity, LogUniform, Rule, TimeStepBias
from megacpp.model.linear_init import input_rule, output_rule

if TYPE_CHECKING:
    from megacpp.blocks.m2rnn.module import M2RNN


def m2rnn_rules(mixer: M2RNN) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the mixer."""
    into = input_rule(mixer.config)
    rules: dict[str, Rule] = {
        **{name: into for name in M2RNN_KIND.rows(mixer.config) if name.startswith("in_")},
        "output_projection.weight": output_rule(mixer.config),
        "state_weight": Identity(),
        "D": Constant(1.0),
        "decay_gate.A_log": LogUniform(0.0, 16.0),
        "decay_gate.dt_bias": TimeStepBias(1e-3, 0.1, 1e-4),
        "g_norm.weight": Constant(1.0),
    }
    return rules | {f"{name}.weight": conv.rule() for name, conv in mixer.short_convs().items()}
