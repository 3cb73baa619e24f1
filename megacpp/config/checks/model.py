"""Rules between the settings of a model; no torch import here."""

from __future__ import annotations

from collections.abc import Iterator

from megacpp.blocks.engram.checks import engram_rules
from megacpp.blocks.experts.checks import null_rules
from megacpp.blocks.mtp.checks import mtp_rules
from megacpp.config.schema import Config
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import layer_kinds
from megacpp.model.primes import nearest_divisor
from megacpp.model.sizes import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    m2rnn_heads,
)

MOST_PARAMETERS = 10**15  # a thousand times the largest model; beyond it sizes pass 2^63


def model_rules(config: Config) -> Iterator[ConfigError]:
    """Every broken rule of the blocks that the pattern uses; without any, of them together."""
    none = True
    for error in _of_blocks(config):
        none = False
        yield error
    if none:
        yield from _parameters(config)


def _parameters(config: Config) -> Iterator[ConfigError]:
    model = config.model
    total = sum(layer_parameters(model)) + embedding_parameters(model) + head_parameters(model)
    if total > MOST_PARAMETERS:
        rule = f"makes a model of {total:.1e} parameters, at most {MOST_PARAMETERS:.0e} can be"
        yield config_error("model.dim", model.dim, rule, "use smaller dims or fewer of them")


def _of_blocks(config: Config) -> Iterator[ConfigError]:
    try:
        letters = {kind[0] for kind in layer_kinds(config.model)}
    except ConfigError as error:
        yield error
        return
    yield from engram_rules(config)
    if "A" in letters or config.model.mtp.depths:
        yield from _attention(config)
    if "M" in letters:
        yield from _mamba3(config)
    if "E" in letters:
        yield from _moe(config)
    if "R" in letters:
        yield from _m2rnn(config)
    yield from mtp_rules(config)


def _attention(config: Config) -> Iterator[ConfigError]:
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
    if a.yarn is not None:
        yield config_error(
            "model.attention.yarn", "on", "is implemented for MLA", "set model.attention.kind=mla"
        )


def _mamba3(config: Config) -> Iterator[ConfigError]:
    m, inner = config.model.mamba3, config.model.mamba3.expand * config.model.dim
    if inner % m.headdim:
        near = nearest_divisor(inner, m.headdim)
        yield config_error(
            "model.mamba3.headdim",
            m.headdim,
            f"must divide expand * dim ({inner})",
            f"use model.mamba3.headdim={near}",
        )
        return
    heads = inner // m.headdim
    if heads % m.ngroups:
        near = nearest_divisor(heads, m.ngroups)
        yield config_error(
            "model.mamba3.ngroups",
            m.ngroups,
            f"must divide the number of heads ({heads})",
            f"use model.mamba3.ngroups={near}",
        )
    if m.rope_fraction not in (0.5, 1.0):
        yield config_error(
            "model.mamba3.rope_fraction", m.rope_fraction, "must be 0.5 or 1.0", "use 0.5"
        )
    elif m.d_state % 4:
        yield config_error(
            "model.mamba3.d_state",
            m.d_state,
            "must be a multiple of 4 (rotated pairs)",
            f"use model.mamba3.d_state={-(-m.d_state // 4) * 4}",
        )
    if not m.dt_min <= m.dt_max:
        yield config_error(
            "model.mamba3.dt_min", m.dt_min, f"must not exceed dt_max ({m.dt_max})", "swap them"
        )


def _moe(config: Config) -> Iterator[ConfigError]:
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


def _m2rnn(config: Config) -> Iterator[ConfigError]:
    r = config.model.m2rnn
    heads = m2rnn_heads(config.model)
    for name in ("num_q_heads", "num_k_heads"):
        value = getattr(r, name)
        if heads % value:
            yield config_error(
                f"model.m2rnn.{name}",
                value,
                f"must divide the number of heads ({heads})",
                f"use model.m2rnn.{name}={nearest_divisor(heads, value)}",
            )


def _even(value: int) -> str:
    return f"use {value + 1}"
