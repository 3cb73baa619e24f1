"""Recompute policy: what each kind of block runs again in the backward; no torch import here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacpp.config.settings import setting


@dataclass(frozen=True)
class CheckpointingPolicy:
    """Activation memory: what the backward computes again instead of keeping, by block kind.

    (Saved training state is `CheckpointConfig`.) By default experts, convolutions, recurrences and
    further tokens run again. The last layer keeps all in any case: its backward comes at once. In a
    compiled block the compiler follows `activation_memory_budget` alone. `megacpp activations`
    shows what each costs.
    """

    ablock: Literal["none", "selective", "full"] = setting(
        "none", "A blocks; selective: softmax(q k^T) v, and for MLA its projections too."
    )
    # expert_gemm_only: nothing is routed or sent again.
    eblock: Literal["none", "expert_gemm_only", "full"] = setting(
        "expert_gemm_only", "E blocks; expert_gemm_only: rows and hidden units of the experts."
    )
    mblock: Literal["none", "conv_bc_only"] = setting(
        "conv_bc_only", "M blocks; conv_bc_only: convolution, norms, rotations, never the scan."
    )
    rblock: Literal["none", "recurrence", "full_plus_norms"] = setting(
        "recurrence", "R blocks; recurrence: from the states where chunks start."
    )
    gblock: Literal["none", "conv_gate", "full"] = setting(
        "none", "G blocks; conv_gate: convolution, norm and gate, never the scan."
    )
    fblock: Literal["none", "full"] = setting("none", "F blocks: nothing, or all of the block.")
    norms: bool = setting(False, "Norms of every block.")
    regather: Literal["auto", "on", "off"] = setting(
        "auto", "Gather a mixer's input over tp again, not keep all of it (auto: where norms are)."
    )
    core_attn: bool = setting(False, "Scores and output of attention, as ablock=selective does.")
    mlp: bool = setting(False, "Hidden units of F blocks and of shared experts.")
    mla_q_upproj: bool = setting(False, "Queries of MLA, from the latent they are projected from.")
    mla_kv: bool = setting(False, "Keys and values of MLA, from the latent.")
    mtp: bool = setting(True, "Each depth of multi-token prediction but the last.")
    mhc_group_size: int = setting(
        0,
        "Layers with hyper-connections that run again together (0: chosen, -1: none).",
        "layers",
        at_least=-1,
    )
    last_layer: Literal["never"] = setting("never", "The last layer keeps all it needs.")
    fp8_wrapper: Literal["auto", "te_checkpoint", "torchao"] = setting(
        "auto", "Checkpoint function of FP8 layers (auto: the one that their library needs)."
    )
    offload: Literal["none", "block_inputs", "saved_tensors"] = setting(
        "none", "Move to host memory until the backward: inputs of blocks, or all that is kept."
    )
    offload_min_mib: float = setting(1.0, "Smallest tensor that is offloaded.", "MiB", at_least=0)
    offload_host_gib: float = setting(
        64.0, "Most that waits on the host; the rest stays on the device.", "GiB", above=0
    )
    compress: float = setting(
        0.0,
        "Part of their width to which inputs of linear layers are projected (0: off).",
        at_least=0,
        below=1,
    )
    compress_redraw: int = setting(
        200, "Steps after which projections are drawn again (0: never).", "steps", at_least=0
    )
    activation_memory_budget: float = setting(
        -1.0,
        "Share of a compiled block's activations that is kept (-1: 0.5 under a policy, else 1).",
        at_least=-1,
        at_most=1,
    )


# Experts and convolutions keep all, too: what others are compared with.
KEEP = CheckpointingPolicy(eblock="none", mblock="none")
