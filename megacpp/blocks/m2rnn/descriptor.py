"""M2RNN (R) as other rooms read it; no torch import here.

Letters: W heads * value, Q and K channels of queries and keys, H heads, P value, J taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import (
    ALL_TOKENS,
    AllocationSettings,
    BlockKind,
    ContextExchange,
    Parameter,
)
from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import nearest_divisor

if TYPE_CHECKING:
    from megacpp.blocks.m2rnn.module import M2RNN
    from megacpp.config.schema import CheckpointingPolicy, Config, MeshConfig, ModelConfig
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.regions import Region


def num_heads(model: ModelConfig) -> int:
    """Heads of an R block."""
    r = model.m2rnn
    return r.num_heads or max(1, model.dim // (r.key_dim + r.value_dim))


def build(kind: str, model: ModelConfig, layer: int) -> M2RNN:
    """Return the mixer."""
    from megacpp.blocks.m2rnn.module import M2RNN

    return M2RNN(model)


def dims(model: ModelConfig) -> dict[str, int]:
    """Sizes of the letters above."""
    r, heads = model.m2rnn, num_heads(model)
    return {
        "H": heads,
        "W": heads * r.value_dim,
        "Q": r.num_q_heads * r.key_dim,
        "K": r.num_k_heads * r.key_dim,
        "P": r.value_dim,
        "J": r.conv_kernel,
    }


def own_q(model: ModelConfig) -> bool:
    """Return whether there are several query heads, which are sharded like the others."""
    return model.m2rnn.num_q_heads > 1


def own_k(model: ModelConfig) -> bool:
    """Return whether there are several key heads, which are sharded like the others."""
    return model.m2rnn.num_k_heads > 1


def shared_q(model: ModelConfig) -> bool:
    """Whether a single query head serves all heads, so that every rank has it whole."""
    return not own_q(model)


def shared_k(model: ModelConfig) -> bool:
    """Whether a single key head serves all heads, so that every rank has it whole."""
    return not own_k(model)


def query_rows(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of each query head."""
    return (model.m2rnn.key_dim,) * model.m2rnn.num_q_heads


def key_rows(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of each key head."""
    return (model.m2rnn.key_dim,) * model.m2rnn.num_k_heads


def value_rows(model: ModelConfig) -> tuple[int, ...]:
    """Return the rows of each value head."""
    return (model.m2rnn.value_dim,) * num_heads(model)


PARAMETERS = (
    Parameter(("state_weight",), "[H_tp, P, P]", "adamw", decay=False, fp32=True),
    Parameter(("D",), "[H_tp, P]", "vector", fp32=True),
    Parameter(("in_q.weight",), "[Q_tp, D]", "muon", rows=query_rows, compress=True, when=own_q),
    Parameter(("in_q.weight",), "[Q, D]", "muon", rows=query_rows, compress=True, when=shared_q),
    Parameter(("in_k.weight",), "[K_tp, D]", "muon", rows=key_rows, compress=True, when=own_k),
    Parameter(("in_k.weight",), "[K, D]", "muon", rows=key_rows, compress=True, when=shared_k),
    Parameter(("in_v.weight",), "[W_tp, D]", "muon", rows=value_rows, fp8=True, compress=True),
    Parameter(("in_forget.weight",), "[H_tp, D]", "adamw", compress=True),
    Parameter(("in_gate.weight",), "[W_tp, D]", "muon", fp8=True, compress=True),
    Parameter(("conv_q.weight",), "[Q_tp, O, J]", "adamw", decay=False, when=own_q),
    Parameter(("conv_q.weight",), "[Q, O, J]", "adamw", decay=False, when=shared_q),
    Parameter(("conv_k.weight",), "[K_tp, O, J]", "adamw", decay=False, when=own_k),
    Parameter(("conv_k.weight",), "[K, O, J]", "adamw", decay=False, when=shared_k),
    Parameter(("conv_v.weight",), "[W_tp, O, J]", "adamw", decay=False),
    Parameter(("decay_gate.A_log", "decay_gate.dt_bias"), "[H_tp]", "vector", fp32=True),
    Parameter(("g_norm.weight",), "[W_tp]", "vector", fp32=True),
    Parameter(("output_projection.weight",), "[D, W_tp]", "muon", fp8=True),
)


def tensor_dims(model: ModelConfig) -> dict[str, int]:
    """Numbers of heads, and of query and key heads where they are sharded, by setting."""
    found = {"the number of M2RNN heads": num_heads(model)}
    for name in ("num_q_heads", "num_k_heads"):
        if getattr(model.m2rnn, name) > 1:
            found[f"model.m2rnn.{name}"] = getattr(model.m2rnn, name)
    return found


def checks(config: Config) -> Iterator[ConfigError]:
    """Yield errors of query and key heads that don't divide the heads."""
    heads = num_heads(config.model)
    for name in ("num_q_heads", "num_k_heads"):
        value = getattr(config.model.m2rnn, name)
        if heads % value:
            yield config_error(
                f"model.m2rnn.{name}",
                value,
                f"must divide the number of heads ({heads})",
                f"use model.m2rnn.{name}={nearest_divisor(heads, value)}",
            )


def multiply_adds(model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of projections, and per head of h W and q h."""
    r, d, heads = model.m2rnn, model.dim, num_heads(model)
    qk, v = (r.num_q_heads + r.num_k_heads) * r.key_dim, heads * r.value_dim
    projections = d * (qk + 2 * v + heads) + v * d
    return projections + heads * r.key_dim * (r.value_dim**2 + r.value_dim)


def last_product(model: ModelConfig) -> float:
    """Multiply-adds a token of the output projection."""
    return float(model.dim * num_heads(model) * model.m2rnn.value_dim)


def regions(policy: CheckpointingPolicy, model: ModelConfig) -> set[Region]:
    """Return no regions: `recompute.rblock` sets `M2RNN.keep_states`, or the whole block."""
    return set()


def replayed(config: Config) -> float:
    """Multiply-adds a token of the products that compute the states between chunks again."""
    if config.recompute.rblock == "none":
        return 0.0
    r = config.model.m2rnn
    return float(num_heads(config.model) * r.key_dim * r.value_dim**2)


def heads_exchanged(model: ModelConfig) -> tuple[str, int]:
    """Name and number of heads."""
    return "the number of M2RNN heads", num_heads(model)


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp`, with their bytes (megacpp/blocks/m2rnn/traffic.py)."""
    from megacpp.blocks.m2rnn.traffic import context_traffic as bytes_of

    return bytes_of(own)


def once(model: ModelConfig, mesh: MeshConfig) -> bool:
    """Whether states travel over `cp` in series: sends and receives in one order."""
    uneven = num_heads(model) % (mesh.tp * mesh.cp) > 0
    return mesh.cp_m2rnn == "serial" or (mesh.cp_m2rnn == "auto" and uneven)


M2RNN_KIND = BlockKind(
    letter="R",
    name="M2RNN",
    build=build,
    parameters=PARAMETERS,
    dims=dims,
    checks=checks,
    tensor_dims=tensor_dims,
    layouts=(ALL_TOKENS,),
    multiply_adds=multiply_adds,
    allocations=AllocationSettings("m2rnn", kernel="m2rnn", policy=("rblock",)),
    regions=regions,
    replayed=replayed,
    whole="rblock",
    last_product=last_product,
    recurrent=True,
    context=ContextExchange(
        "cp_m2rnn",
        heads_exchanged,
        "serial",
        context_traffic,
        taps=lambda model: model.m2rnn.conv_kernel,
        once=once,
    ),
    upstream=(
        (
            "input_projection.weight",
            tuple(f"in_{part}.weight" for part in ("q", "k", "v", "forget", "gate")),
        ),
        ("conv1d.weight", ("conv_q.weight", "conv_k.weight", "conv_v.weight")),
    ),
)
