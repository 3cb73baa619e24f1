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
    if a.kind == "mla":
        if a.qk_rope_head_dim % 2:
            key = "model.attention.qk_rope_head_dim"
            yield config_error(
                key,
                a.qk_rope_head_dim,
                "rotary pairs need an even number",
                _even(a.qk_rope_head_dim),
            )
        if a.qk_norm or a.softcap is not None:
            name = "qk_norm" if a.qk_norm else "softcap"
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
    if a.head_dim % 2:
        yield config_error(
            "model.attention.head_dim",
            a.head_dim,
            "rotary pairs need an even number",
            _even(a.head_dim),
        )


def _even(value: int) -> str:
    return f"use {value + 1}"
