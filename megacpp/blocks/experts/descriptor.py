"""Mixture of experts (E) as other packages read it; no torch import here.

Letters: E experts, I hidden units of one, F hidden units of the shared experts together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from megacpp.blocks.descriptor import (
    LOSS_BUFFERS,
    ActivationLayout,
    AllocationSettings,
    BlockKind,
    ForeignTensor,
    Parameter,
)
from megacpp.blocks.experts.checks import checks, mesh_rules, policy_checks
from megacpp.blocks.experts.choices import columns, null_copies
from megacpp.blocks.experts.rows import counts, operators, sends

if TYPE_CHECKING:
    from megacpp.blocks.experts.module import MixtureOfExperts
    from megacpp.config.schema import CheckpointingPolicy, Config, ModelConfig
    from megacpp.memory.forms.local_shapes import LocalShapes
    from megacpp.model.compiled import GraphPart
    from megacpp.model.regions import Region

ROUTED = "sizes of what is routed depend on values"  # so no graph knows them
COUNTED = "the choice of experts adds to buffers"


def build(kind: str, model: ModelConfig, layer: int) -> MixtureOfExperts:
    """Return the mixer."""
    from megacpp.blocks.experts.module import MixtureOfExperts

    return MixtureOfExperts(model)


def dims(model: ModelConfig) -> dict[str, int]:
    """Sizes of the letters above."""
    e = model.moe
    return {"E": e.num_experts, "I": e.hidden_dim, "F": e.num_shared * e.shared_hidden_dim}


def num_experts(model: ModelConfig) -> int:
    """Return the number of routed experts."""
    return model.moe.num_experts


def gated(model: ModelConfig) -> bool:
    """Return whether experts are SwiGLUs, which have a third matrix."""
    return model.moe.activation == "swiglu"


def shared(model: ModelConfig) -> bool:
    """Return whether the model has shared experts."""
    return model.moe.num_shared > 0


def shared_gate(model: ModelConfig) -> bool:
    """Return whether the model has shared experts with a gate."""
    return shared(model) and model.moe.shared_gate


def biased(model: ModelConfig) -> bool:
    """Return whether a bias of each expert takes part in the choice."""
    return model.moe.score == "sigmoid"


PARAMETERS = (
    Parameter(("router.weight",), "[E, D]", "adamw", fp32=True),
    Parameter(("experts.w1",), "[E_ep, I, D]", "muon"),
    Parameter(("experts.w3",), "[E_ep, I, D]", "muon", when=gated),
    Parameter(("experts.w2",), "[E_ep, D, I]", "muon"),
    Parameter(("shared.w1.weight",), "[F_tp, D]", "muon", fp8=True, compress=True, when=shared),
    Parameter(("shared.w3.weight",), "[F_tp, D]", "muon", fp8=True, compress=True, when=shared),
    Parameter(("shared.w2.weight",), "[D, F_tp]", "muon", fp8=True, when=shared),
    Parameter(("shared.gate.weight",), "[O, D]", "adamw", compress=True, when=shared_gate),
)

HF = (
    ForeignTensor("mlp.gate.weight", ("router.weight",)),
    ForeignTensor("mlp.gate.e_score_correction_bias", ("router.expert_bias",), when=biased),
    ForeignTensor("mlp.experts.{e}.gate_proj.weight", ("experts.w1",)),
    ForeignTensor("mlp.experts.{e}.up_proj.weight", ("experts.w3",)),
    ForeignTensor("mlp.experts.{e}.down_proj.weight", ("experts.w2",)),
    ForeignTensor("mlp.shared_experts.gate_proj.weight", ("shared.w1.weight",), when=shared),
    ForeignTensor("mlp.shared_experts.up_proj.weight", ("shared.w3.weight",), when=shared),
    ForeignTensor("mlp.shared_experts.down_proj.weight", ("shared.w2.weight",), when=shared),
    ForeignTensor("mlp.shared_expert_gate.weight", ("shared.gate.weight",), when=shared_gate),
)


def tensor_dims(model: ModelConfig) -> dict[str, int]:
    """Hidden units of the shared experts, by setting; routed ones are sharded over `ep`."""
    hidden = dims(model)["F"]
    return {"model.moe.num_shared * shared_hidden_dim": hidden} if shared(model) else {}


def multiply_adds(model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of router, chosen experts, shared experts and their gate."""
    e, d = model.moe, model.dim
    routed = e.top_k * (3 if gated(model) else 2) * d * e.hidden_dim
    return d * e.num_experts + routed + 3 * d * dims(model)["F"] + d * shared_gate(model)


def regions(policy: CheckpointingPolicy, model: ModelConfig) -> set[Region]:
    """Recompute regions: gate and up of the shared experts and of the routed ones."""
    found: set[Region] = {"mlp"} if policy.mlp else set()
    return found | ({"expert_gemm"} if policy.eblock == "expert_gemm_only" else set())


def region_multiply_adds(region: Region, model: ModelConfig, seq_len: int) -> float:
    """Multiply-adds a token of gate and up, of the shared or of the chosen experts."""
    if region == "mlp":
        return 2.0 * model.dim * dims(model)["F"]
    if region == "expert_gemm":
        e = model.moe
        return float(e.top_k * (2 if gated(model) else 1) * model.dim * e.hidden_dim)
    return 0.0


def buffer_numbers(model: ModelConfig, kind: str) -> tuple[int, int]:
    """Return numbers (bias and counts, losses, two sums of loads) and integers of a router."""
    choices = model.moe.num_experts + 2 * (null_copies(model.moe) > 0)
    return choices + LOSS_BUFFERS + 2, choices


def shared_bytes(own: LocalShapes, kinds: Collection[str], saved: bool) -> int:
    """Return bytes of the number and length of each token's document."""
    shared = own.tp > 1 or own.cp > 1
    return own.rows * own.row * (16 + 8 * shared) + own.stream * 48 * shared


def lines(config: Config) -> Iterator[str]:
    """Yield what the header of a run says of null experts, groups and a capacity."""
    moe, mesh = config.model.moe, config.mesh
    if null_copies(moe):
        yield (
            f"null experts: a token chooses {columns(moe)} of {moe.num_experts} experts and "
            f"{null_copies(moe)} nulls, {moe.top_k} experts on average"
        )
    if moe.num_groups > 1:
        yield f"experts in {moe.num_groups} groups, of which a token visits {moe.top_k_groups}"
    if moe.capacity_factor is not None:
        padded = mesh.ep > 1 and mesh.ep_dispatch == "padded"
        whose = f"the tokens of {mesh.ep} ranks" if padded else "each rank's tokens"
        yield (
            f"experts take up to {moe.capacity_factor:g} times an even share of {whose} and "
            "drop the rest: the loss depends on the mesh"
        )


def why_eager(mixer: MixtureOfExperts) -> str:
    """Return the reason why a block can't be one compiled graph."""
    return COUNTED if _one_graph(mixer) else ROUTED


def graph_part(mixer: MixtureOfExperts) -> GraphPart | None:
    """Return all behind the choice of experts, or the shared expert alone, or None."""
    from megacpp.model.compiled import GraphPart

    shared = mixer.shared
    if _one_graph(mixer):
        inside = mixer.dispatch, mixer.experts, mixer.combine, shared
        return GraphPart(mixer, "_mix", tuple(x for x in inside if x is not None), "experts")
    return None if shared is None else GraphPart(shared, "forward", (shared,), "shared expert")


def _one_graph(mixer: MixtureOfExperts) -> bool:
    """Return whether all behind the choice of experts can be one compiled graph.

    Sizes must not depend on the choice, and FSDP2 must not gather the experts apart from their
    block, as it does where the block is cut over `tp`.
    """
    from megacpp.blocks.experts.module import Combine, Dispatch
    from megacpp.torch_extras import is_dtensor

    here = type(mixer.dispatch) is Dispatch and type(mixer.combine) is Combine
    fixed = mixer.moe.capacity_factor is not None or mixer.experts.kernels.experts == "triton"
    return here and fixed and not any(map(is_dtensor, mixer.parameters()))


EXPERTS = BlockKind(
    letter="E",
    name="mixture of experts",
    build=build,
    parameters=PARAMETERS,
    dims=dims,
    checks=checks,
    tensor_dims=tensor_dims,
    # Router and routed experts work on the rank's own tokens; only the shared expert is sharded.
    layouts=(ActivationLayout("shared", "x[T_tp, D] -> x[T, D]", "y[T, D]{tp} -> y[T_tp, D]"),),
    multiply_adds=multiply_adds,
    allocations=AllocationSettings(
        "moe",
        kernel="experts",
        mesh=("ep", "ep_dispatch"),
        counts=counts,
        same=operators,
        uneven=lambda model: model.moe.capacity_factor is None,
    ),
    shared_bytes=shared_bytes,
    sends=sends,
    policy_checks=policy_checks,
    mesh_rules=mesh_rules,
    buffer_numbers=buffer_numbers,
    why_eager=why_eager,
    graph_part=graph_part,
    regions=regions,
    region_multiply_adds=region_multiply_adds,
    compared="none",  # some libraries sum rows in another order, which may change what follows
    whole="eblock",
    lines=lines,
    hf=HF,
)
