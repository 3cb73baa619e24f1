"""Rules of null experts and of groups of experts; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.config.schema import MeshConfig, MoEConfig
from megacpp.errors import ConfigError, config_error


def null_rules(moe: MoEConfig) -> Iterator[ConfigError]:
    """Null experts need a bias that keeps their part."""
    if moe.null_rho < 1 and not moe.bias_update_rate:
        yield config_error(
            "model.moe.bias_update_rate",
            moe.bias_update_rate,
            f"only a bias keeps null experts at their part (null_rho={moe.null_rho:g})",
            "use model.moe.bias_update_rate=0.001 or model.moe.null_rho=1",
        )


def straddling_groups(moe: MoEConfig, mesh: MeshConfig) -> str:
    """What is wrong with groups of experts that lie on ranks as these do; empty if nothing."""
    groups = moe.num_groups
    if groups == 1 or moe.top_k_groups == groups or not (groups % mesh.ep and mesh.ep % groups):
        return ""
    return (
        f"must divide model.moe.num_groups ({groups}) or be a multiple of it: a token visits "
        f"{moe.top_k_groups} groups, and those that straddle ranks don't bound what it is sent to"
    )
