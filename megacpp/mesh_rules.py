"""Rules between a mesh and the model that is to lie on it; no torch import here.

Each message names the nearest degree that is legal for the whole model, not only for the dimension
that it complains about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megacpp.config import Config, MeshConfig, ModelConfig
from megacpp.errors import ConfigError, config_error
from megacpp.model.pattern import block_letters

AXES = ("pp", "dp_replicate", "cp", "tp", "ep")


def mesh_rules(config: Config, world_size: int) -> Iterator[ConfigError]:
    """Every broken rule; those between mesh and model only once the axes make a mesh."""
    broken = list(_axes(config.mesh, world_size, config.model.moe.num_experts))
    yield from broken
    if broken:
        return
    try:
        letters = set(block_letters(config.model.pattern, config.model.depth))
    except ConfigError:
        return  # reported by the rules of the model
    mesh = resolve_mesh(config.mesh, world_size)
    yield from _tensor(config, mesh, letters)
    yield from _context(config, mesh, letters)
    yield from _experts(config, mesh, letters)


def resolve_mesh(mesh: MeshConfig, world_size: int) -> MeshConfig:
    """`dp_shard` filled in."""
    if mesh.dp_shard != -1:
        return mesh
    rest = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    return replace(mesh, dp_shard=max(1, world_size // rest))


def batch_ranks(mesh: MeshConfig, world_size: int) -> int:
    """Ranks (or groups of them) that read different rows."""
    return mesh.dp_replicate * resolve_mesh(mesh, world_size).dp_shard


def row_chunks(mesh: MeshConfig) -> int:
    """Equal chunks into which context parallelism cuts a row."""
    return mesh.cp * 2 if mesh.cp > 1 and mesh.cp_order == "head_tail" else mesh.cp


def _axes(mesh: MeshConfig, world_size: int, experts: int) -> Iterator[ConfigError]:
    for axis in AXES:
        if getattr(mesh, axis) < 1:
            yield config_error(f"mesh.{axis}", getattr(mesh, axis), "must be at least 1", "use 1")
            return
    if mesh.dp_shard != -1 and mesh.dp_shard < 1:
        yield config_error(
            "mesh.dp_shard", mesh.dp_shard, "must be -1 (fill) or at least 1", "use -1"
        )
        return
    rest = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    factors = " * ".join(
        f"{axis}={getattr(mesh, axis)}"
        for axis in ("pp", "dp_replicate", "cp", "tp")
        if getattr(mesh, axis) > 1
    )
    if mesh.dp_shard == -1 and world_size % rest:
        axis = max(("pp", "dp_replicate", "cp", "tp"), key=lambda a: getattr(mesh, a))
        others = rest // getattr(mesh, axis)
        near = nearest(math.gcd(world_size, world_size // math.gcd(world_size, others)), mesh, axis)
        yield config_error(
            f"mesh.{axis}",
            getattr(mesh, axis),
            f"{factors if others > 1 else 'it'} must divide the world ({world_size} ranks)",
            f"use mesh.{axis}={near}, or start {-(-world_size // rest) * rest} ranks",
        )
        return
    if mesh.dp_shard != -1 and rest * mesh.dp_shard != world_size:
        yield config_error(
            "mesh.dp_shard",
            mesh.dp_shard,
            f"makes {rest * mesh.dp_shard} ranks{' with ' if factors else ''}{factors}, "
            f"not {world_size}",
            f"use -1, or start {rest * mesh.dp_shard} ranks",
        )
        return
    folded = resolve_mesh(mesh, world_size).dp_shard * mesh.cp * mesh.tp
    if folded % mesh.ep:
        yield config_error(
            "mesh.ep",
            mesh.ep,
            f"must divide dp_shard * cp * tp ({folded}), whose ranks share the experts",
            f"use mesh.ep={nearest(math.gcd(folded, experts), mesh, 'ep')}",
        )


def tensor_dims(config: ModelConfig, letters: set[str]) -> dict[str, int]:
    """What `tp` must divide, by setting."""
    dims = {"model.vocab_size": config.vocab_size}
    a, m, r, e = config.attention, config.mamba3, config.m2rnn, config.moe
    if "A" in letters:
        dims["model.attention.num_heads"] = a.num_heads
        if a.kind == "gqa":
            dims["model.attention.num_kv_heads"] = a.num_kv_heads
    if "F" in letters:
        dims["model.mlp.hidden_dim"] = config.mlp.hidden_dim
    if "E" in letters and e.num_shared:
        dims["model.moe.num_shared * shared_hidden_dim"] = e.num_shared * e.shared_hidden_dim
    if "M" in letters:
        dims["the number of Mamba-3 heads"] = m.expand * config.dim // m.headdim
    if "R" in letters:
        dims["the number of M2RNN heads"] = m2rnn_heads(config)
        for name in ("num_q_heads", "num_k_heads"):
            if getattr(r, name) > 1:
                dims[f"model.m2rnn.{name}"] = getattr(r, name)
    return dims


def m2rnn_heads(config: ModelConfig) -> int:
    """Heads of an R block."""
    r = config.m2rnn
    return r.num_heads or max(1, config.dim // (r.key_dim + r.value_dim))


def _tensor(config: Config, mesh: MeshConfig, letters: set[str]) -> Iterator[ConfigError]:
    if mesh.tp == 1:
        return
    dims = tensor_dims(config.model, letters)
    tokens = config.data.seq_len // mesh.cp
    common = math.gcd(*dims.values(), tokens)
    near = nearest(common, mesh, "tp")
    for name, size in dims.items():
        if size % mesh.tp:
            yield config_error(
                "mesh.tp", mesh.tp, f"must divide {name} ({size})", f"use mesh.tp={near}"
            )
            return
    groups = config.model.mamba3.ngroups
    if "M" in letters and groups % mesh.tp and mesh.tp % groups:
        yield config_error(
            "mesh.tp",
            mesh.tp,
            f"must divide model.mamba3.ngroups ({groups}) or be a multiple of it",
            f"use mesh.tp={nearest(math.gcd(common, groups), mesh, 'tp')}",
        )
        return
    if tokens % mesh.tp:
        yield config_error(
            "mesh.tp",
            mesh.tp,
            f"must divide data.seq_len / mesh.cp ({tokens}): sequence parallelism cuts tokens",
            f"use mesh.tp={near}",
        )


def _context(config: Config, mesh: MeshConfig, letters: set[str]) -> Iterator[ConfigError]:
    if mesh.cp == 1:
        return
    chunks, model = row_chunks(mesh), config.model
    if config.data.seq_len % chunks:
        fit = [
            d for d in range(1, mesh.cp + 1) if not config.data.seq_len % (d * chunks // mesh.cp)
        ]
        yield config_error(
            "mesh.cp",
            mesh.cp,
            f"{mesh.cp_order} order cuts data.seq_len ({config.data.seq_len}) into {chunks} chunks",
            f"use mesh.cp={max(fit, default=1)} or data.seq_len="
            f"{-(-config.data.seq_len // (chunks * mesh.tp)) * chunks * mesh.tp}",
        )
        return
    taps = [
        kernel
        for letter, kernel in (("M", model.mamba3.conv_kernel), ("R", model.m2rnn.conv_kernel))
        if letter in letters
    ]
    tokens = config.data.seq_len // chunks
    if taps and tokens < max(taps) - 1:
        yield config_error(
            "mesh.cp",
            mesh.cp,
            f"leaves chunks of {tokens} tokens, a convolution looks back {max(taps) - 1}",
            f"use data.seq_len={(max(taps) - 1) * chunks} or more",
        )
    for letter, key, heads in _head_exchanges(config, mesh):
        if letter in letters and heads % (mesh.tp * mesh.cp):
            other = {"cp_attention": "all_gather", "cp_mamba3": "state", "cp_m2rnn": "serial"}[key]
            yield config_error(
                f"mesh.{key}",
                "heads",
                f"needs heads ({heads}) that divide by tp * cp ({mesh.tp * mesh.cp})",
                f"use mesh.{key}={other}",
            )


def _head_exchanges(config: Config, mesh: MeshConfig) -> Iterator[tuple[str, str, int]]:
    """Letter, setting and heads of every mixer that is to exchange heads for tokens."""
    model = config.model
    if mesh.cp_attention == "heads":
        yield "A", "cp_attention", model.attention.num_heads
        if model.attention.kind == "gqa":
            yield "A", "cp_attention", model.attention.num_kv_heads
    if mesh.cp_mamba3 == "heads":
        yield "M", "cp_mamba3", model.mamba3.expand * model.dim // model.mamba3.headdim
    if mesh.cp_m2rnn == "heads":
        yield "R", "cp_m2rnn", m2rnn_heads(model)


def _experts(config: Config, mesh: MeshConfig, letters: set[str]) -> Iterator[ConfigError]:
    experts = config.model.moe.num_experts
    if mesh.ep == 1:
        return
    if "E" not in letters:
        yield config_error(
            "mesh.ep", mesh.ep, "the model has no E block to spread", "use mesh.ep=1"
        )
    elif experts % mesh.ep:
        folded = mesh.dp_shard * mesh.cp * mesh.tp
        yield config_error(
            "mesh.ep",
            mesh.ep,
            f"must divide model.moe.num_experts ({experts})",
            f"use mesh.ep={nearest(math.gcd(experts, folded), mesh, 'ep')}",
        )


def nearest(total: int, mesh: MeshConfig, axis: str) -> int:
    """The divisor of `total` that is closest to what `mesh` wants for an axis."""
    wanted = getattr(mesh, axis)
    divisors = [d for d in range(1, min(total, 2 * wanted) + 1) if total % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
