"""The whole configuration of a run as frozen dataclasses; no torch import here.

Flags are the dotted field names (`--model.depth 12`, `--optim.lr 3e-3`). A preset is a function
that returns a `Config` (megacpp/presets.py). Rules between fields live in megacpp/rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megacpp.model_config import (
    AttentionConfig as AttentionConfig,
)
from megacpp.model_config import (
    EngramConfig as EngramConfig,
)
from megacpp.model_config import (
    HyperConnectionConfig as HyperConnectionConfig,
)
from megacpp.model_config import (
    M2RNNConfig as M2RNNConfig,
)
from megacpp.model_config import (
    Mamba3Config as Mamba3Config,
)
from megacpp.model_config import (
    MLPConfig as MLPConfig,
)
from megacpp.model_config import (
    ModelConfig as ModelConfig,
)
from megacpp.model_config import (
    MoEConfig as MoEConfig,
)
from megacpp.model_config import (
    MTPConfig as MTPConfig,
)
from megacpp.model_config import (
    NgramConfig as NgramConfig,
)
from megacpp.model_config import (
    SparseAttentionConfig as SparseAttentionConfig,
)
from megacpp.model_config import (
    TOPConfig as TOPConfig,
)
from megacpp.model_config import (
    YarnConfig as YarnConfig,
)


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives, how long it is, how often it reports."""

    dir: str = "runs/{preset}"
    steps: int = 1000
    seed: int = 42
    log_every: int = 1
    eval_every: int = 0  # 0: only at the end
    eval_rows: int = 0  # validation rows per evaluation (0: all held-out documents)
    sample_tokens: int = 120
    sample_prompt: str = "#pragma once\n\n#include <ATen/"
    tensorboard: bool = True


@dataclass(frozen=True)
class DataConfig:
    """A corpus made by `megacpp data prepare`."""

    path: str = "data/torch-headers"
    seq_len: int = 256


@dataclass(frozen=True)
class TrainConfig:
    """Batch of one optimizer step; gradient accumulation is derived unless it is given."""

    device_batch_size: int = 8  # rows per rank and microbatch
    tokens_per_step: int = 0  # 0: device_batch_size * seq_len * ranks * grad_accum
    grad_accum: int = 0  # microbatches of a step; 0: derived from tokens_per_step
    batch_warmup_steps: int = 0  # steps over which grad_accum grows from an eighth to all of it
    # What a gradient is divided by: valid tokens of the step, or its microbatches, each of which
    # is the mean over its own valid tokens.
    divisor: Literal["tokens", "microbatches"] = "tokens"
    # Gradients over the data axes: summed after the last microbatch (defer), after each one (each,
    # no whole gradient is kept), or once with parameters gathered once a step as well (resident).
    gradient_sync: Literal["defer", "each", "resident"] = "defer"
    # A gradient that isn't finite on some rank: leave the step out everywhere, train on the rest
    # of it with zeros in those places, or stop.
    nonfinite: Literal["skip", "sanitize", "raise"] = "skip"
    max_skips: int = 10  # steps left out in a row before the run gives up
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Each block compiled by itself; then recompute.activation_memory_budget replaces the policy.
    compile: Literal["off", "inductor", "aot_eager"] = "off"


@dataclass(frozen=True)
class MeshConfig:
    """Degrees of each mesh axis; -1 lets dp_shard fill the world."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    # Gathered parameters: shards again after each forward (always) or kept until the backward
    # (never); auto: always above 1 GiB. With a pipeline they are kept from their last forward to
    # the end of the step. For keeping them all through a step see train.gradient_sync.
    reshard: Literal["auto", "always", "never"] = "auto"
    # Context parallelism: order of a row's chunks over ranks, and what each mixer exchanges.
    cp_order: Literal["head_tail", "contiguous"] = "head_tail"
    cp_attention: Literal["all_gather", "ring", "heads"] = "all_gather"
    cp_mamba3: Literal["state", "heads"] = "state"
    cp_m2rnn: Literal["auto", "heads", "serial"] = "auto"  # auto: heads where they divide
    # Experts: one copy of a token per chosen expert, or per rank that holds some of them.
    ep_dispatch: Literal["per_rank", "per_expert"] = "per_rank"
    pp_schedule: Literal["1f1b", "gpipe", "interleaved", "zbv", "dualpipev"] = "1f1b"


@dataclass(frozen=True)
class OptimConfig:
    """Muon on hidden matrices and AdamW on the rest, or AdamW alone."""

    name: Literal["muon_adamw", "adamw"] = "muon_adamw"
    lr: float = 3e-3  # AdamW peak
    embed_lr: float = 0.0  # of the embedding (0: lr)
    head_lr: float = 0.0  # of the head (0: lr)
    vector_lr: float = 0.0  # of norms, biases and other vectors and scalars (0: lr)
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    cautious_weight_decay: bool = False  # decays only where the update shrinks the weight too
    # Moments of AdamW: 8 bytes a parameter, fewer by torchao, or in the memory of the host.
    adamw_state: Literal["fp32", "8bit", "4bit", "cpu_offload"] = "fp32"
    muon_lr: float = 2e-2  # Muon peak
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    muon_momentum_dtype: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 (fp64 in fp64 runs)
    muon_weight_decay: float = 0.0
    muon_steps: int = 5
    muon_coefficients: Literal["quintic", "polar_express"] = "quintic"
    muon_dtype: Literal["auto", "bf16", "fp32"] = "auto"  # of Newton-Schulz and of what travels
    muon_scale: Literal["spectral", "rms"] = "spectral"
    muon_bucket_mib: int = 32  # most that a rank sends at once; bounds the memory of a step
    qk_clip: float = 0.0  # MuonClip: largest attention logit left alone (0: off, 100 published)
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.03  # of run.steps, used when warmup_steps is 0
    decay_ratio: float = 0.2  # of run.steps, the tail of wsd
    final_lr_ratio: float = 0.1
    clip_norm: float = 1.0  # global gradient norm (0: off)


@dataclass(frozen=True)
class PrecisionConfig:
    """`auto`: bf16 compute on a GPU that has it, fp32 on CPU. fp64 exists for proofs.

    A CPU computes in bf16 when told to, and slowly in fp16: to see what they do to a run.
    """

    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    # Loss scale of fp16: halved by a step that overflows, doubled after so many good ones.
    loss_scale: float = 65536.0
    loss_scale_growth: int = 2000
    # Matrix products in FP8: by torchao, or by Transformer Engine (A and F blocks).
    fp8: Literal["off", "torchao", "te"] = "off"
    # Of which kinds of block, and how many of the first and of the last layers stay as they are.
    fp8_layers: str = "AFE"
    fp8_ends: int = 2
    # What has a scale of its own: rows, with weight gradients not in FP8 (gw_hp) or in it, or whole
    # tensors (linear layers; those of experts are by row in any case).
    fp8_recipe: Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"] = "rowwise_with_gw_hp"
    # Scales from all tokens of a rank's microbatch (all recipes but the first, and Transformer
    # Engine) make a loss that depends on the mesh: true if that is what you want.
    fp8_local_scales: bool = False
    fp8_all_gather: bool = False  # FSDP2 gathers linear layers in FP8; tensorwise


@dataclass(frozen=True)
class KernelsConfig:
    """Which code does a hot operation; auto: the first that can run (`megacpp doctor` lists them).

    A backend asked for by name that can't run is refused. `reference` is the definition, slow.
    """

    attention: Literal["auto", "varlen", "flex", "varlen_padded", "torch", "reference"] = "auto"
    mamba3: Literal["auto", "mamba_ssm", "tilelang", "torch", "reference"] = "auto"
    m2rnn: Literal["auto", "triton", "torch", "reference"] = "auto"
    experts: Literal["auto", "triton", "torch", "reference"] = "auto"
    cross_entropy: Literal["auto", "triton", "torch", "reference"] = "auto"


@dataclass(frozen=True)
class CheckpointingPolicy:
    """What the forward keeps for the backward, by block kind; everything else runs again.

    (Activation memory. Saved training state is `CheckpointConfig`.) By default all is kept. The
    last layer keeps all in any case: its backward comes at once. In a compiled block the compiler
    follows `activation_memory_budget` alone. `megacpp activations` shows what each costs.
    """

    # selective: softmax(q k^T) v, and for MLA also the two below.
    ablock: Literal["none", "selective", "full"] = "none"
    # expert_gemm_only: rows and hidden units of the experts; nothing is routed or sent again.
    eblock: Literal["none", "expert_gemm_only", "full"] = "none"
    # conv_bc_only: convolution, norms, biases and rotations around the scan, never the scan.
    mblock: Literal["none", "conv_bc_only"] = "none"
    # recurrence: from the states where chunks start; full_plus_norms: that and all of the block.
    rblock: Literal["none", "recurrence", "full_plus_norms"] = "recurrence"
    fblock: Literal["none", "full"] = "none"
    norms: bool = False  # of every block
    core_attn: bool = False  # what ablock=selective does
    mlp: bool = False  # hidden units of F blocks and shared experts
    mla_q_upproj: bool = False  # MLA queries from what they are projected from
    mla_kv: bool = False  # MLA keys and values from the latent
    mtp: bool = True  # each depth of multi-token prediction
    mhc_group_size: int = 0  # layers of hyper-connections that run again together (0: auto, -1: no)
    last_layer: Literal["never"] = "never"
    # Who runs FP8 layers again: Transformer Engine itself, or what runs others (auto: as needed).
    fp8_wrapper: Literal["auto", "te_checkpoint", "torchao"] = "auto"
    # To the memory of the host until the backward: inputs of blocks, or all that is kept.
    offload: Literal["none", "block_inputs", "saved_tensors"] = "none"
    offload_min_mib: float = 1.0  # smaller tensors stay
    offload_host_gib: float = 64.0  # most that waits on the host; what doesn't fit stays
    # Inputs of linear layers kept as random projections to this part of their width (0: whole).
    compress: float = 0.0
    compress_redraw: int = 200  # steps after which other projections are drawn (0: never)
    # Of a compiled block: part of what it would keep by default (1: all, 0: its inputs).
    activation_memory_budget: float = 1.0


@dataclass(frozen=True)
class CheckpointConfig:
    """Saved training state: when, how many, and what to resume from."""

    every: int = 500  # steps between saves (0: only at the end)
    keep: int = 2  # newest kept (0: all)
    resume: str = "auto"  # auto | never | a checkpoint folder


@dataclass(frozen=True)
class MemoryConfig:
    """The launch gate: an estimate before the start, a record of what came true, snapshots."""

    # A launch that doesn't fit is refused; off: it starts all the same, and the record says so.
    gate: Literal["on", "off"] = "on"
    device_gib: float = 0.0  # memory of a device (0: what this one has)
    headroom: float = 0.10  # part of it that the estimate must leave free
    expandable_segments: bool = True  # of a GPU's allocator: less is lost between tensors
    # auto: plan, try candidates for four steps each, train the first that fits and is sound.
    # smoke: such a try; it ends with its last step, saves nothing and shows nothing.
    fit: Literal["off", "auto", "smoke"] = "off"
    calibration: str = "runs/calibration"  # folder of what estimates were off by (empty: none)
    snapshot_every: int = 1000  # steps between snapshots of what is allocated (0: none)
    snapshot_gap: int = 100  # steps from a snapshot to the one it is compared with


@dataclass(frozen=True)
class Config:
    """Everything a run is; `preset` is the function that it came from."""

    preset: str = "tiny"
    model: ModelConfig = field(default_factory=ModelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    recompute: CheckpointingPolicy = field(default_factory=CheckpointingPolicy)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
