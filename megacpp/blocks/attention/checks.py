"""Rules between the settings of attention; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megacpp.config.checks.broken import Broken
from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import nearest_divisor

if TYPE_CHECKING:
    from megacpp.blocks.attention.config import AttentionConfig
    from megacpp.config.schema import Config, MeshConfig

# Values that leave a setting of grouped-query attention off; of others false.
WITHOUT = {"softcap": "none", "rope_fraction": "1", "window": "0", "full_layers": '""'}


def checks(config: Config) -> Iterator[ConfigError]:
    """Broken rules of `model.attention`."""
    a = config.model.attention
    yarn = a.yarn
    if yarn is not None and yarn.ramp == "turns" and yarn.beta_fast <= yarn.beta_slow:
        yield config_error(
            "model.attention.yarn.beta_fast",
            yarn.beta_fast,
            f"must be above model.attention.yarn.beta_slow ({yarn.beta_slow})",
            "use model.attention.yarn.beta_fast=4 and model.attention.yarn.beta_slow=1",
        )
    if a.kind == "mla":
        if a.qk_rope_head_dim % 2:
            key = "model.attention.qk_rope_head_dim"
            yield config_error(
                key,
                a.qk_rope_head_dim,
                "rotary pairs need an even number",
                _even(a.qk_rope_head_dim),
            )
        gqa_only = {"qk_norm": a.qk_norm, "softcap": a.softcap, "qkv_bias": a.qkv_bias}
        gqa_only |= {"rope_fraction": a.rope_fraction < 1, "qk_norm_wide": a.qk_norm_wide}
        gqa_only |= {"output_gate": a.output_gate, "window": a.window}
        gqa_only |= {"full_layers": a.full_layers}
        for name in (name for name, value in gqa_only.items() if value):
            key = f"model.attention.{name}"
            yield config_error(
                key,
                getattr(a, name),
                "belongs to grouped-query attention, not to MLA",
                f"use model.attention.kind=gqa or {key}={WITHOUT.get(name, 'false')}",
            )
        return
    if a.num_heads % a.num_kv_heads:
        near = nearest_divisor(a.num_heads, a.num_kv_heads)
        yield config_error(
            "model.attention.num_kv_heads",
            a.num_kv_heads,
            f"must divide model.attention.num_heads ({a.num_heads})",
            f"use model.attention.num_kv_heads={near}",
        )
    if a.window and a.sparse.layers:
        yield config_error(
            "model.attention.sparse.layers",
            a.sparse.layers,
            f"knows no window (model.attention.window={a.window})",
            "use model.attention.sparse.layers='', or model.attention.window=0",
        )
    if a.full_layers and not a.window:
        yield config_error(
            "model.attention.full_layers",
            a.full_layers,
            "names blocks without the window that others have, and model.attention.window=0",
            "use model.attention.window=4096, or model.attention.full_layers=''",
        )
    if a.full_layers and yarn is not None and config.optim.qk_clip:
        yield config_error(
            "optim.qk_clip",
            config.optim.qk_clip,
            "knows one temperature, and yarn stretches the blocks of model.attention.full_layers"
            f"={a.full_layers} alone",
            "use optim.qk_clip=0, or model.attention.full_layers=''",
        )
    if a.qk_norm_wide and not a.qk_norm:
        yield config_error(
            "model.attention.qk_norm_wide",
            True,
            "says how to normalise queries and keys, which model.attention.qk_norm=False doesn't",
            "use model.attention.qk_norm=true, or model.attention.qk_norm_wide=false",
        )
    weights_alone = {
        "recompute.compress": (config.recompute.compress, 0),
        "precision.fp8": (config.precision.fp8, "off"),
        "optim.qk_clip": (config.optim.qk_clip, 0),
    }
    for key, (value, off) in weights_alone.items() if a.qkv_bias else ():
        if value != off:
            yield config_error(
                key,
                value,
                "works on weights without a bias",
                f"use {key}={off}, or model.attention.qkv_bias=false",
            )
    if a.head_dim % 2:
        yield config_error(
            "model.attention.head_dim",
            a.head_dim,
            "rotary pairs need an even number",
            _even(a.head_dim),
        )
    elif odd_rotation(a.head_dim, a.rope_fraction):
        yield config_error(
            "model.attention.rope_fraction",
            a.rope_fraction,
            f"rotary pairs need an even number of dims, of {a.head_dim} it takes "
            f"{int(a.head_dim * a.rope_fraction)}",
            "use model.attention.rope_fraction=1",
        )


def policy_checks(config: Config) -> Iterator[ConfigError]:
    """Yield regions of multi-head latent attention that a policy names without it."""
    for name in ("mla_q_upproj", "mla_kv") if config.model.attention.kind != "mla" else ():
        if getattr(config.recompute, name):
            yield config_error(
                f"recompute.{name}",
                True,
                "there is no latent, model.attention.kind=gqa",
                f"use recompute.{name}=false",
            )


def mesh_rules(config: Config, mesh: MeshConfig, letters: set[str]) -> Iterator[Broken]:
    """Yield meshes that can't shard the choice of keys or the warm-up of the indexer."""
    sparse = config.model.attention.sparse
    if not sparse.layers.strip():
        return
    if mesh.cp > 1 and mesh.cp_attention != "all_gather":
        rule = "sparse attention chooses among the keys of whole rows, for all heads alike"
        yield Broken(
            "cp_attention", mesh.cp_attention, rule, (), "use mesh.cp_attention=all_gather"
        )
    if mesh.pp > 1 and sparse.stage == "dense":
        rule = "a stage without indexer would have no backward (model.attention.sparse.stage=dense)"
        yield Broken("pp", mesh.pp, rule, ("pp",))


def odd_rotation(dim: int, fraction: float) -> bool:
    """Return whether the rotated part of a head of `dim` dims isn't made of pairs, or is empty."""
    return int(dim * fraction) % 2 == 1 or dim * fraction < 2


def check_heads(config: AttentionConfig) -> None:
    """Check the soft cap, head counts and head dims of attention.

    Raises:
        ConfigError: a value that attention can't work with.
    """
    key = "model.attention"
    if config.softcap is not None and config.softcap <= 0:
        raise config_error(
            f"{key}.softcap", config.softcap, "must be above 0", "use None for no cap"
        )
    if config.kind == "gqa" and config.num_heads % config.num_kv_heads:
        raise config_error(
            f"{key}.num_kv_heads",
            config.num_kv_heads,
            f"must divide model.attention.num_heads ({config.num_heads})",
            "use a divisor",
        )
    field = "head_dim" if config.kind == "gqa" else "qk_rope_head_dim"
    rotated = getattr(config, field)
    if rotated % 2 or rotated < 2:
        raise config_error(
            f"{key}.{field}", rotated, "rotary turns pairs, it must be even", "use an even number"
        )


def _even(value: int) -> str:
    return f"use {value + 1}"
