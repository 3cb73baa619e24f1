"""Rules between the settings of experts; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megacpp.config.checks.broken import Broken
from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import nearest_divisor

if TYPE_CHECKING:
    from megacpp.blocks.experts.config import MoEConfig
    from megacpp.config.schema import Config, MeshConfig


def checks(config: Config) -> Iterator[ConfigError]:
    """Broken rules of `model.moe`."""
    e = config.model.moe
    yield from null_rules(e)
    if e.top_k > e.num_experts:
        yield config_error(
            "model.moe.top_k",
            e.top_k,
            f"must not exceed num_experts ({e.num_experts})",
            f"use model.moe.top_k={e.num_experts} or less",
        )
        return
    if e.num_experts % e.num_groups:
        near = nearest_divisor(e.num_experts, e.num_groups)
        yield config_error(
            "model.moe.num_groups",
            e.num_groups,
            f"must divide num_experts ({e.num_experts})",
            f"use model.moe.num_groups={near}",
        )
        return
    if e.top_k_groups > e.num_groups:
        yield config_error(
            "model.moe.top_k_groups",
            e.top_k_groups,
            f"must not exceed num_groups ({e.num_groups})",
            f"use model.moe.top_k_groups={e.num_groups} or less",
        )
        return
    open_experts = e.top_k_groups * e.num_experts // e.num_groups
    if e.top_k > open_experts:
        yield config_error(
            "model.moe.top_k",
            e.top_k,
            f"the {e.top_k_groups} kept groups hold only {open_experts} experts",
            "raise top_k_groups or lower top_k",
        )
    if e.num_groups > 1 and e.num_experts // e.num_groups < 2:
        yield config_error(
            "model.moe.num_groups",
            e.num_groups,
            "a group's score is its best two experts, so it needs 2",
            f"use {e.num_experts // 2} or less",
        )
    if e.shared_gate and not e.num_shared:
        yield config_error(
            "model.moe.shared_gate",
            True,
            "there is no shared expert to gate",
            "set num_shared=1 or turn it off",
        )


def null_rules(moe: MoEConfig) -> Iterator[ConfigError]:
    """Yield broken rules of null experts, which need a bias that keeps their part."""
    if moe.null_rho < 1 and not moe.bias_update_rate:
        yield config_error(
            "model.moe.bias_update_rate",
            moe.bias_update_rate,
            f"only a bias keeps null experts at their part (null_rho={moe.null_rho:g})",
            "use model.moe.bias_update_rate=0.001 or model.moe.null_rho=1",
        )


def policy_checks(config: Config) -> Iterator[ConfigError]:
    """Yield an error if whole E blocks would be recomputed across ranks."""
    ep, pattern = config.mesh.ep, config.model.pattern
    if config.recompute.eblock == "full" and ep > 1 and "E" in pattern.upper():
        yield config_error(
            "recompute.eblock",
            "full",
            f"would send the rows of all experts again in the backward (mesh.ep={ep})",
            "use recompute.eblock=expert_gemm_only, with recompute.norms and recompute.mlp",
        )


def mesh_rules(config: Config, mesh: MeshConfig, letters: set[str]) -> Iterator[Broken]:
    """Yield degrees of `ep` that no experts, or no groups of experts, can be spread over."""
    moe, ep = config.model.moe, mesh.ep
    if "E" not in letters:
        if ep > 1:
            yield Broken("ep", ep, "the model has no E block to spread", ("ep",))
        return
    groups = moe.num_groups
    if moe.num_experts % ep:
        rule = f"must divide model.moe.num_experts ({moe.num_experts})"
        yield Broken("ep", ep, rule, ("ep",))
    elif groups > 1 and moe.top_k_groups != groups and groups % ep and ep % groups:
        rule = (
            f"must divide model.moe.num_groups ({groups}) or be a multiple of it: a token visits "
            f"{moe.top_k_groups} groups, and those that straddle ranks don't bound what it is sent "
            "to"
        )
        yield Broken("ep", ep, rule, ("ep",))
