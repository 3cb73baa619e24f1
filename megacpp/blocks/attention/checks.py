"""Rules between the settings of attention; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import nearest_divisor

if TYPE_CHECKING:
    from megacpp.config.schema import Config


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
        gqa_only["rope_fraction"] = a.rope_fraction < 1
        for name in (name for name, value in gqa_only.items() if value):
            yield config_error(
                f"model.attention.{name}",
                getattr(a, name),
                "belongs to grouped-query attention, not to MLA",
                "set model.attention.kind=gqa or leave it off",
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
    elif int(a.head_dim * a.rope_fraction) % 2 or a.head_dim * a.rope_fraction < 2:
        yield config_error(
            "model.attention.rope_fraction",
            a.rope_fraction,
            f"rotary pairs need an even number of dims, of {a.head_dim} it takes "
            f"{int(a.head_dim * a.rope_fraction)}",
            "use model.attention.rope_fraction=1",
        )


def _even(value: int) -> str:
    return f"use {value + 1}"
