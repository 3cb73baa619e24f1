"""M2RNN (R) as other packages read it; no torch import here.

Letters: W heads * value, Q and K channels of queries and keys, H heads, P value, J taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import (
    ALL_TOKENS,
    AllocationSettings,
    BlockKind,
    ContextExchange,
    ForeignTensor,
    Parameter,
)
from megacpp.errors import ConfigError, config_error
from megacpp.model.primes import nearest_divisor

if TYPE_CHECKING:
    from torch import Tensor

    from megacpp.blocks.m2rnn.module import M2RNN
    from megacpp.config.schema import CheckpointingPolicy, Config, MeshConfig, ModelConfig
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.documents import Documents
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


def replayed(config: Config, kind: str, regions: frozenset[Region]) -> float:
    """Multiply-adds a token of the products that compute the states between chunks again."""
    if config.recompute.rblock == "none":
        return 0.0
    r = config.model.m2rnn
    return float(num_heads(config.model) * r.key_dim * r.value_dim**2)


def heads_exchanged(model: ModelConfig) -> tuple[str, int]:
    """Name and number of heads."""
    return "the number of M2RNN heads", num_heads(model)


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    r, wanted = own.config.model.m2rnn, own.config.mesh.cp_m2rnn
    heads = num_heads(own.config.model) // own.tp
    qk = [n // own.tp if n > 1 else n for n in (r.num_q_heads, r.num_k_heads)]
    channels = heads * r.value_dim + sum(qk) * r.key_dim
    yield "ends of chunks", own.halo_bytes(channels, r.conv_kernel)
    if wanted == "serial" or (wanted == "auto" and heads % own.cp):
        # A state over every border of two ranks' chunks, and its gradient back.
        chunk = [own.context] if own.chunks == 1 else [own.context, 2 * own.cp - 1 - own.context]
        most = own.cp * own.chunks
        turning = own.chunks == 2 and own.context == own.cp - 1  # its two chunks are neighbours
        borders = sum((c > 0) + (c < most - 1) for c in chunk) - 2 * turning
        state = own.rows * heads * r.key_dim * r.value_dim * own.wide
        yield "states", 2 * borders * state
        return
    moved = heads * 2 * r.value_dim + sum(n * r.key_dim for n in qk if n % own.cp == 0)
    gathered = sum(n * r.key_dim for n in qk if n % own.cp)
    yield "heads", 2 * own.tokens * moved * own.compute
    yield "heads", 2 * own.tokens * heads * own.wide
    yield "heads", 2 * own.rows * own.row * gathered * own.compute


def sends(own: LocalShapes, parts: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, str, int]]:
    """Yield the sums of the output norm over `tp`."""
    times = sum(2 + again for kind, again in parts if kind[0] == "R")
    yield "tp", "activations", times * own.tokens * own.wide * (own.tp > 1)


def once(model: ModelConfig, mesh: MeshConfig) -> bool:
    """Whether states travel over `cp` in series: sends and receives in one order."""
    uneven = num_heads(model) % (mesh.tp * mesh.cp) > 0
    return mesh.cp_m2rnn == "serial" or (mesh.cp_m2rnn == "auto" and uneven)


def why_eager(mixer: M2RNN) -> str | None:
    """Return the reason why a block can't be one compiled graph, or None."""
    from megacpp.blocks.m2rnn.module import M2RNNScan
    from megacpp.model import compiled

    if mixer.g_norm.over_ranks is not None:
        return "its norm is a sum over ranks"
    return compiled.why_eager(mixer, M2RNNScan, "m2rnn", ("triton",))


def graph_inputs(mixer: M2RNN, docs: Documents, x_BTD: Tensor) -> Documents:
    """Return the documents with the cached values that a scan and a convolution need."""
    from megacpp.kernels.m2rnn.backends import anywhere, sequences_of
    from megacpp.model.compiled import graph_documents

    def sequences(read: Documents) -> None:
        read.memo("sequences", lambda: anywhere(sequences_of(docs, x_BTD)))

    return graph_documents(docs, ("m2rnn",), mixer.conv_q.num_taps, sequences)


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
    sends=sends,
    shared_bytes=lambda own, kinds, saved: own.rows * own.row * 9,
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
    why_eager=why_eager,
    graph_inputs=graph_inputs,
    upstream=(
        ForeignTensor(
            "input_projection.weight",
            tuple(f"in_{part}.weight" for part in ("q", "k", "v", "forget", "gate")),
        ),
        ForeignTensor("conv1d.weight", ("conv_q.weight", "conv_k.weight", "conv_v.weight")),
    ),
)
