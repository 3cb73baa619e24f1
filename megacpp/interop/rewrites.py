"""Rewrites of tensors that classes of Hugging Face share; no torch import here."""

from __future__ import annotations

from megacpp.blocks.descriptor import ForeignTensor
from megacpp.blocks.experts.descriptor import EXPERTS, num_experts
from megacpp.config.model import ModelConfig
from megacpp.interop.hf_class import Change, Zeros


def route_scale(model: ModelConfig) -> float:
    """Return the factor that routed experts take over where a class has none."""
    return model.moe.route_scale


def twice_if_ungated(model: ModelConfig) -> float:
    """Return 2 for a shared expert whose gate is written as zeros, a sigmoid of 1/2."""
    return 1.0 if model.moe.shared_gate else 2.0


def twice_if_no_output_gate(model: ModelConfig) -> float:
    """Return 2 for an output projection behind gates that are written as zeros."""
    return 1.0 if model.attention.output_gate else 2.0


def ungated(model: ModelConfig) -> bool:
    """Return whether a shared expert has no gate."""
    return not model.moe.shared_gate


def unshared(model: ModelConfig) -> bool:
    """Return whether there is no shared expert."""
    return not model.moe.num_shared


FOLDED = {
    "mlp.experts.{e}.down_proj.weight": Change(scale=route_scale),
    "mlp.experts.down_proj": Change(scale=route_scale),
}
GATED_SHARED = {**FOLDED, "mlp.shared_experts.down_proj.weight": Change(scale=twice_if_ungated)}
GATE = Zeros("E", "mlp.shared_expert_gate.weight", lambda model: (1, model.dim), ungated)
PADDED = {
    "mlp.shared_experts.gate_proj.weight": Change(pad="rows"),
    "mlp.shared_experts.up_proj.weight": Change(pad="rows"),
    "mlp.shared_experts.down_proj.weight": Change(pad="columns"),
}
EMPTY = (
    *(
        Zeros("E", f"mlp.shared_experts.{name}.weight", lambda model: (0, model.dim), unshared)
        for name in ("gate_proj", "up_proj")
    ),
    Zeros("E", "mlp.shared_experts.down_proj.weight", lambda model: (model.dim, 0), unshared),
)
ONE_SHARED = (("shared_experts.", "shared_expert."),)
FROM_ZERO = Change(shift=-1.0)  # a norm there multiplies by 1 + weight
INTO_PAIRS = {
    f"self_attn.indexer.{name}": Change(order="index_pairs")
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
}
# Where a folder's `rope_interleave` is false.
IN_HALVES = {
    "self_attn.q_proj.weight": Change(order="rotated_last"),
    "self_attn.q_b_proj.weight": Change(order="rotated_last"),
    "self_attn.kv_a_proj_with_mqa.weight": Change(order="rotated_key"),
}
GRANITE_EXPERTS = (
    ForeignTensor("block_sparse_moe.router.layer.weight", ("router.weight",)),
    ForeignTensor(
        "block_sparse_moe.input_linear.weight", ("experts.w1", "experts.w3"), groups=num_experts
    ),
    ForeignTensor("block_sparse_moe.output_linear.weight", ("experts.w2",)),
    ForeignTensor("shared_mlp.input_linear.weight", ("shared.w1.weight", "shared.w3.weight")),
    ForeignTensor("shared_mlp.output_linear.weight", ("shared.w2.weight",)),
)
# E block with its experts stacked, as transformers holds them in memory and some folders do.
STACKED_EXPERTS = (
    ForeignTensor("mlp.experts.gate_up_proj", ("experts.w1", "experts.w3"), groups=num_experts),
    ForeignTensor("mlp.experts.down_proj", ("experts.w2",)),
    *(tensor for tensor in EXPERTS.hf if "{e}" not in tensor.name),
)
