"""Settings of mixture-of-experts blocks (E): `model.moe`; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import MANY, WIDEST, setting


@dataclass(frozen=True)
class MoEConfig:
    """E blocks: token-choice mixture of experts with optional shared experts."""

    num_experts: int = setting(8, "Routed experts of a layer.", "experts", at_least=1, at_most=MANY)
    top_k: int = setting(2, "Experts that a token visits.", "experts", at_least=1)
    hidden_dim: int = setting(
        256, "Hidden width of a routed expert.", "dims", at_least=1, at_most=WIDEST
    )
    activation: Literal["swiglu", "relu2"] = setting("swiglu", "Activation of routed experts.")
    num_shared: int = setting(
        1, "Shared experts, which every token visits.", "experts", at_least=0, at_most=1024
    )
    shared_hidden_dim: int = setting(
        256, "Hidden width of a shared expert, always SwiGLU.", "dims", at_least=1, at_most=WIDEST
    )
    shared_gate: bool = setting(False, "Put a sigmoid gate on the output of shared experts.")
    score: Literal["sigmoid", "softmax"] = setting("sigmoid", "Function of the router's logits.")
    softmax_order: Literal["pre", "post"] = setting(
        "post", "Softmax before or after the choice of top_k experts."
    )
    route_scale: float = setting(1.0, "Factor on the weights of chosen experts.", above=0)
    num_groups: int = setting(
        1, "Groups of experts, as the nodes that hold them.", "groups", at_least=1
    )
    top_k_groups: int = setting(1, "Groups that a token visits.", "groups", at_least=1)
    null_rho: float = setting(
        1.0,
        "Part of the chosen slots that real experts get (1: no null experts).",
        above=0,
        at_most=1,
    )
    load_warning: float = setting(
        4.0, "Busiest expert over its layer's mean from which a warning is printed.", at_least=1
    )
    bias_update_rate: float = setting(
        1e-3,
        "Rate of the bias that balances experts with sigmoid scores (0: no bias).",
        at_least=0,
    )
    capacity_factor: float | None = setting(
        None, "Tokens of an expert over the mean; the rest is dropped (none: dropless).", above=0
    )
    balance_loss: float = setting(
        0.0, "Weight of the Switch balance loss of a microbatch (0: off).", at_least=0
    )
    sequence_loss: float = setting(
        0.0, "Weight of the balance loss of each document (0: off).", at_least=0
    )
    z_loss: float = setting(0.0, "Weight of the router's z-loss (0: off).", at_least=0)
