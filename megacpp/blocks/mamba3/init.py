"""Initial values of M blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp.blocks.mamba3.descriptor import MAMBA3
from megacpp.model.init import Constant, Rule, TimeStepBias
from megacpp.model.linear_init import input_rule, output_rule

if TYPE_CHECKING:
    from megacpp.blocks.mamba3.module import Mamba3


def mamba3_rules(mixer: Mamba3) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the mixer."""
    m = mixer.mamba
    into = input_rule(mixer.config)
    rules: dict[str, Rule] = {
        **{name: into for name in MAMBA3.rows(mixer.config) if name.startswith("in_")},
        "out_proj.weight": output_rule(mixer.config),
        "dt_bias": TimeStepBias(m.dt_min, m.dt_max, m.dt_init_floor),
        "B_bias": Constant(1.0),
        "C_bias": Constant(1.0),
        "D": Constant(1.0),
        "B_norm.weight": Constant(1.0),
        "C_norm.weight": Constant(1.0),
    }
    if m.mimo_rank > 1:
        share = Constant(1.0 / m.mimo_rank)
        rules |= {"mimo_x": share, "mimo_z": Constant(1.0), "mimo_o": share}
    if mixer.norm is not None:
        rules["norm.weight"] = Constant(1.0)
    return rules | {f"{name}.weight": conv.rule() for name, conv in mixer.short_convs().items()}
