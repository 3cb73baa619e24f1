"""Initial values of F blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp.model.init import Rule
from megacpp.model.linear_init import input_rule, output_rule

if TYPE_CHECKING:
    from megacpp.blocks.dense.module import MLP


def mlp_rules(mlp: MLP) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the mixer."""
    into = ("w1", "w3") if mlp.activation == "swiglu" else ("w1",)
    rules: dict[str, Rule] = {f"{name}.weight": input_rule(mlp.config) for name in into}
    return rules | {"w2.weight": output_rule(mlp.config)}
