"""Initial values of E blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp.blocks.dense.init import mlp_rules
from megacpp.model.auxiliary import BUFFERS
from megacpp.model.init import Constant, Rule
from megacpp.model.linear_init import input_rule, output_rule

if TYPE_CHECKING:
    from megacpp.blocks.experts.module import Experts, MixtureOfExperts, SharedExpert
    from megacpp.blocks.experts.router import Router


def router_rules(router: Router) -> dict[str, Rule]:
    """Return the rule of every parameter and buffer, by name below the router."""
    zeros = ("expert_bias", "tokens_per_expert", "gradient_squares", *BUFFERS)
    return {"weight": input_rule(router.config), **{name: Constant(0.0) for name in zeros}}


def expert_rules(experts: Experts) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the experts."""
    into = ("w1", "w3") if experts.config.moe.activation == "swiglu" else ("w1",)
    rules: dict[str, Rule] = {name: input_rule(experts.config) for name in into}
    return rules | {"w2": output_rule(experts.config)}


def shared_expert_rules(shared: SharedExpert) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the expert."""
    gate = {} if shared.gate is None else {"gate.weight": input_rule(shared.config)}
    return mlp_rules(shared) | gate


def mixture_rules(mixer: MixtureOfExperts) -> dict[str, Rule]:
    """Return the rule of every parameter and buffer, by name below the mixer."""
    parts = {"router": mixer.router.init_rules(), "experts": mixer.experts.init_rules()}
    if mixer.shared is not None:
        parts["shared"] = mixer.shared.init_rules()
    return {f"{part}.{name}": rule for part, own in parts.items() for name, rule in own.items()}
