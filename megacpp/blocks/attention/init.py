"""Initial values of A blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacpp.model.init import Constant, Rule
from megacpp.model.linear_init import input_rule, output_rule

if TYPE_CHECKING:
    from megacpp.blocks.attention.gqa import GroupedQueryAttention
    from megacpp.blocks.attention.mla import MultiHeadLatentAttention


def grouped_query_rules(mixer: GroupedQueryAttention) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the mixer."""
    attention, into = mixer.config.attention, input_rule(mixer.config)
    rules: dict[str, Rule] = {f"{name}.weight": into for name in ("wq", "wk", "wv")}
    rules["wo.weight"] = output_rule(mixer.config)
    if attention.output_gate:
        rules["wg.weight"] = into
    if attention.qkv_bias:
        rules |= {f"{name}.bias": Constant(0.0) for name in ("wq", "wk", "wv")}
    if attention.qk_norm:
        rules |= {f"{name}.weight": Constant(1.0) for name in ("q_norm", "k_norm")}
    return rules


def latent_rules(mixer: MultiHeadLatentAttention) -> dict[str, Rule]:
    """Return the rule of every parameter, by name below the mixer."""
    low_rank = mixer.config.attention.q_lora_rank > 0
    into = ("wq_a", "wq_b", "wkv_a", "wkv_b") if low_rank else ("wq", "wkv_a", "wkv_b")
    rules: dict[str, Rule] = {f"{name}.weight": input_rule(mixer.config) for name in into}
    rules["wo.weight"] = output_rule(mixer.config)
    rules["kv_norm.weight"] = Constant(1.0)
    if low_rank:
        rules["q_norm.weight"] = Constant(1.0)
    return rules
