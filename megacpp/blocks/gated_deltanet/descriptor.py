"""Gated DeltaNet (G) as other packages read it; no torch import here.

Letters: Q key heads * key, W value heads * value, N value heads, V value, J taps. Heads are sharded
by key head, each with its value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    from torch import Tensor, nn

    from megacpp.blocks.gated_deltanet.module import GatedDeltaNet
    from megacpp.config.schema import CheckpointingPolicy, Config, ModelConfig
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.documents import Documents
    from megacpp.model.regions import Region


def build(kind: str, model: ModelConfig, layer: int) -> GatedDeltaNet:
    """Return the mixer."""
    from megacpp.blocks.gated_deltanet.module import GatedDeltaNet

    return GatedDeltaNet(model)


def dims(model: ModelConfig) -> dict[str, int]:
    """Sizes of the letters above."""
    g = model.gated_deltanet
    return {
        "Q": g.num_key_heads * g.key_dim,
        "W": g.num_value_heads * g.value_dim,
        "N": g.num_value_heads,
        "V": g.value_dim,
        "J": g.conv_kernel,
    }


def gated(model: ModelConfig) -> bool:
    """Return whether the normed output has a gate."""
    return model.gated_deltanet.gate


PARAMETERS = (
    Parameter(("A_log", "dt_bias"), "[N_tp]", "vector", fp32=True),
    Parameter(("in_q.weight", "in_k.weight"), "[Q_tp, D]", "muon", fp8=True, compress=True),
    Parameter(("in_v.weight",), "[W_tp, D]", "muon", fp8=True, compress=True),
    Parameter(("in_z.weight",), "[W_tp, D]", "muon", fp8=True, compress=True, when=gated),
    Parameter(("in_b.weight", "in_a.weight"), "[N_tp, D]", "adamw", compress=True),
    Parameter(("conv_q.weight", "conv_k.weight"), "[Q_tp, O, J]", "adamw", decay=False),
    Parameter(("conv_v.weight",), "[W_tp, O, J]", "adamw", decay=False),
    Parameter(("norm.weight",), "[V]", "vector", fp32=True),
    Parameter(("out_proj.weight",), "[D, W_tp]", "muon", fp8=True),
)


def key_heads(model: ModelConfig) -> int:
    """Return the key heads, which take turns in fused tensors of projections."""
    return model.gated_deltanet.num_key_heads


FUSED = (  # Qwen3-Next
    ForeignTensor(
        "in_proj_qkvz.weight",
        ("in_q.weight", "in_k.weight", "in_v.weight", "in_z.weight"),
        groups=key_heads,
    ),
    ForeignTensor("in_proj_ba.weight", ("in_b.weight", "in_a.weight"), groups=key_heads),
    ForeignTensor("conv1d.weight", ("conv_q.weight", "conv_k.weight", "conv_v.weight")),
)

HF = (
    *(replace(fused, name=f"linear_attn.{fused.name}", when=gated) for fused in FUSED),
    *(
        ForeignTensor(f"linear_attn.{name}", (name,), when=gated)
        for name in ("dt_bias", "A_log", "norm.weight", "out_proj.weight")
    ),
)


def checks(config: Config) -> Iterator[ConfigError]:
    """Yield an error if key heads don't divide value heads."""
    g = config.model.gated_deltanet
    if g.num_value_heads % g.num_key_heads:
        near = nearest_divisor(g.num_value_heads, g.num_key_heads)
        yield config_error(
            "model.gated_deltanet.num_key_heads",
            g.num_key_heads,
            f"must divide num_value_heads ({g.num_value_heads})",
            f"use model.gated_deltanet.num_key_heads={near}",
        )


def multiply_adds(model: ModelConfig, seq_len: int) -> float:
    """Return multiply-adds of a token: of the projections and of its chunk."""
    g, d, size = model.gated_deltanet, model.dim, dims(model)
    inputs = 2 * size["Q"] + (1 + g.gate) * size["W"] + 2 * size["N"]
    return d * (inputs + size["W"]) + scan_multiply_adds(model, seq_len)


def scan_multiply_adds(model: ModelConfig, seq_len: int) -> float:
    """Return multiply-adds of a chunk: k.k, solve, k.state, k.u, q.k, q.state and scores.u.

    The triangular solve counts half of a product of its sizes.
    """
    g, size = model.gated_deltanet, dims(model)
    chunk = min(g.chunk_size, seq_len)
    heads, keys = g.num_value_heads, g.num_value_heads * g.key_dim
    solve = 0.5 * chunk * (keys + size["W"])
    return 3 * heads * g.key_dim * g.value_dim + chunk * (2 * size["Q"] + size["W"]) + solve


def replayed(config: Config, kind: str, regions: frozenset[Region]) -> float:
    """Return multiply-adds of all chunks again: only the inputs of the scan are saved."""
    return scan_multiply_adds(config.model, config.data.seq_len)


def last_product(model: ModelConfig) -> float:
    """Multiply-adds a token of the output projection."""
    return float(model.dim * dims(model)["W"])


def regions(policy: CheckpointingPolicy, model: ModelConfig) -> set[Region]:
    """Recompute regions: short convolution, and norm and gate behind the scan."""
    return {"conv_bc"} if policy.gblock == "conv_gate" else set()


def value_heads(model: ModelConfig) -> tuple[str, int]:
    """Name and number of heads exchanged for tokens; a key head goes with its value heads."""
    return "model.gated_deltanet.num_value_heads", model.gated_deltanet.num_value_heads


def context_traffic(own: LocalShapes) -> Iterator[tuple[str, int]]:
    """Exchanges of one layer over `cp` in a forward and a backward, with their bytes."""
    g = own.config.model.gated_deltanet
    heads, key_heads = g.num_value_heads // own.tp, g.num_key_heads // own.tp
    keys, values = 2 * key_heads * g.key_dim, heads * g.value_dim
    yield "ends of chunks", own.halo_bytes(keys + values, g.conv_kernel)
    if own.config.mesh.cp_gated_deltanet == "state":
        numbers = heads * g.key_dim * (g.key_dim + g.value_dim)
        yield "states", 2 * own.cp * own.chunks * own.rows * numbers * own.wide
        return
    divides = key_heads % own.cp == 0
    yield "heads", 2 * own.tokens * (2 * values + divides * keys) * own.compute
    yield "heads", 2 * own.tokens * heads * 2 * own.wide
    if not divides:
        yield "heads", 2 * own.rows * own.row * keys * own.compute


def why_eager(mixer: nn.Module) -> str | None:
    """Return the reason why a block can't be one compiled graph, or None."""
    from megacpp.blocks.gated_deltanet.module import GatedDeltaScan
    from megacpp.model import compiled

    return compiled.why_eager(mixer, GatedDeltaScan, "gated_delta_rule", ("triton",))


def graph_inputs(mixer: GatedDeltaNet, docs: Documents, x_BTD: Tensor) -> Documents:
    """Return the documents with the cached values that a scan and a convolution need."""
    from megacpp.kernels.gated_delta_rule.triton import runs
    from megacpp.model.compiled import graph_documents

    return graph_documents(docs, ("delta rule",), mixer.delta.conv_kernel, runs)


GATED_DELTANET = BlockKind(
    letter="G",
    name="Gated DeltaNet",
    build=build,
    parameters=PARAMETERS,
    dims=dims,
    checks=checks,
    tensor_dims=lambda model: {
        "model.gated_deltanet.num_key_heads": model.gated_deltanet.num_key_heads
    },
    layouts=(ALL_TOKENS,),
    multiply_adds=multiply_adds,
    allocations=AllocationSettings("gated_deltanet", kernel="gated_delta_rule"),
    shared_bytes=lambda own, kinds, saved: (
        own.rows * own.row * (own.config.model.gated_deltanet.chunk_size + 1)
    ),
    regions=regions,
    whole="gblock",
    last_product=last_product,
    replayed=replayed,
    recurrent=True,
    context=ContextExchange(
        "cp_gated_deltanet",
        value_heads,
        "state",
        context_traffic,
        taps=lambda model: model.gated_deltanet.conv_kernel,
    ),
    why_eager=why_eager,
    graph_inputs=graph_inputs,
    upstream=FUSED,
    hf=HF,
)
