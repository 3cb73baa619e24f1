"""Configuration of a run as frozen dataclasses; imports no torch.

Flags are the dotted field names (`--model.depth 12`, `--optim.lr 3e-3`). A preset is a function
that returns a `Config` (megacpp/config/presets.py). A field's sentence, unit and range are its
metadata (megacpp/config/settings.py); rules between fields are in megacpp/config/checks/every.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megacpp.config.model import ModelConfig as ModelConfig
from megacpp.config.policy import KEEP as KEEP
from megacpp.config.policy import CheckpointingPolicy as CheckpointingPolicy
from megacpp.config.saving import CheckpointConfig as CheckpointConfig
from megacpp.config.settings import WIDEST, setting

MOST_RANKS = 1 << 17  # reports iterate over all ranks


@dataclass(frozen=True)
class RunConfig:
    """Folder of the run, its length, and how often it reports."""

    dir: str = setting("runs/{preset}", "Folder of the run; {preset} is filled in.")
    force: bool = setting(False, "Take the folder from a start that gives no sign of life.")
    steps: int = setting(1000, "Optimizer steps of the run.", "steps", at_least=0)
    seed: int = setting(42, "Seed of weights and of the order of data; below 2**63.", at_least=0)
    log_every: int = setting(
        1, "Steps from one line on the screen to the next.", "steps", at_least=1
    )
    eval_every: int = setting(
        0, "Steps from one evaluation to the next (0: only at the end).", "steps", at_least=0
    )
    eval_rows: int = setting(
        0, "Held-out rows of an evaluation (0: all of them).", "rows", at_least=0
    )
    tasks: str = setting(
        "", "Tasks to evaluate as `megacpp eval` does: fim,compiles (empty: none)."
    )
    tasks_every: int = setting(
        0, "Steps from one evaluation of tasks to the next (0: at the end).", "steps", at_least=0
    )
    tasks_limit: int = setting(0, "Documents of each task (0: all).", "documents", at_least=0)
    sample_tokens: int = setting(
        120, "Tokens of the sample at the end (0: no sample).", "tokens", at_least=0, at_most=WIDEST
    )
    sample_prompt: str = setting(
        "", "Text that the sample continues (empty: first words of a held-out document)."
    )
    tensorboard: bool = setting(True, "Write TensorBoard events into the run folder.")
    wandb: str = setting(
        "", "Project of Weights & Biases (empty: none; WANDB_MODE=offline stays here)."
    )
    until: int = setting(
        0,
        "Leave after this step and keep nothing, for replays (0: go on to run.steps).",
        "steps",
        at_least=0,
    )
    monitor: str = setting(
        "", "PORT on the loopback address, or HOST:PORT, for /status and /metrics (empty: none)."
    )
    digest_every: int = setting(
        100,
        "Steps between comparisons of all ranks' copies, bit for bit (0: never).",
        "steps",
        at_least=0,
    )
    audit_every: int = setting(
        0,
        "Steps between microbatches whose gradients are computed again, bit for bit (0: never).",
        "steps",
        at_least=0,
    )
    timeout: str = setting(
        "start=1800,step=600,save=1800,evaluation=1800",
        "Time without progress that ends a hang, by phase or for all: 60 (0: never).",
        "seconds",
    )
    profile: str = setting(
        "", "Steps to trace for Perfetto, counted from 1: 10, or 10:12 for three (empty: none)."
    )


@dataclass(frozen=True)
class DataConfig:
    """Corpus made by `megacpp data prepare`, and the length of its rows."""

    path: str = setting("data/torch-headers", "Folder of the corpus.")
    mix: str = setting(
        "",
        "Corpora or texts, shares: code=0.6,prose=0.4; by step: a=1@0,a=1,b=3@9 (empty: path).",
    )
    seq_len: int = setting(256, "Tokens of a row.", "tokens", at_least=2, at_most=WIDEST)


@dataclass(frozen=True)
class TrainConfig:
    """Batch of one optimizer step; gradient accumulation is derived unless it is given."""

    device_batch_size: int = setting(
        8, "Rows of a rank's microbatch.", "rows", at_least=1, at_most=1 << 20
    )
    tokens_per_step: int = setting(
        0, "Tokens of a step over all ranks (0: follows from grad_accum).", "tokens", at_least=0
    )
    grad_accum: int = setting(
        0,
        "Microbatches of a step (0: follows from tokens_per_step).",
        "microbatches",
        at_least=0,
        at_most=1_000_000,
    )
    batch_warmup_steps: int = setting(
        0,
        "Steps over which grad_accum, which a mesh decides, grows from an eighth (0: none).",
        "steps",
        at_least=0,
        at_most=1_000_000,  # the schedule enumerates every step
    )
    num_chunks: int = setting(
        1, "Equal parts into which a pipeline cuts each microbatch.", "parts", at_least=1
    )
    static_shapes: bool = setting(
        False, "A step is one graph of fixed shapes (as on XLA): grad_accum never changes."
    )
    divisor: Literal["tokens", "microbatches"] = setting(
        "tokens", "Gradient over valid tokens of the step, or mean of microbatches' own means."
    )
    # resident: parameters are gathered once a step as well.
    gradient_sync: Literal["defer", "each", "resident"] = setting(
        "defer", "Sum over data ranks once a step, after each microbatch, or once, all gathered."
    )
    # off: a step whose norm isn't finite is left out, but nobody looks which rank it was.
    nonfinite: Literal["skip", "sanitize", "raise", "off"] = setting(
        "skip",
        "A step with a non-finite gradient: leave it out, put zeros there, stop, or don't look.",
    )
    max_skips: int = setting(
        10, "Bad steps in a row that end the run (exit code 5), or rewind it.", "steps", at_least=1
    )
    rewinds: int = setting(
        0, "Times the run may go back to a sound checkpoint and skip the rows since.", at_least=0
    )
    max_spikes: int = setting(
        0,
        "Spikes of loss or gradient norm in a row that rewind the run (0: none).",
        "steps",
        at_least=0,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device of every rank (auto: a GPU if there is one)."
    )
    compile: Literal["off", "inductor", "aot_eager"] = setting(
        "off", "Compile each block; activation_memory_budget then replaces the recompute policy."
    )


def _degree(default: int, words: str) -> Any:
    """Return the field of a mesh axis."""
    return setting(default, words, "ranks", at_least=min(1, default), at_most=MOST_RANKS)


@dataclass(frozen=True)
class MeshConfig:
    """Degrees of each mesh axis; their product, without ep, is the number of ranks."""

    pp: int = _degree(1, "Pipeline parallelism: stages of layers.")
    dp_replicate: int = _degree(1, "Copies of all shards (HSDP); without shards it is as dp_shard.")
    dp_shard: int = _degree(-1, "Data parallelism with FSDP2's shards (-1: fills the world).")
    cp: int = _degree(1, "Context parallelism: chunks of a row.")
    tp: int = _degree(1, "Tensor and sequence parallelism; divides heads and widths.")
    ep: int = _degree(1, "Expert parallelism; divides dp_shard * cp * tp and the experts.")
    # With a pipeline, parameters are kept from their last forward to the end of the step. For
    # keeping them all through a step see train.gradient_sync.
    reshard: Literal["auto", "always", "never"] = setting(
        "auto", "Free gathered parameters after each forward (auto: always above 1 GiB)."
    )
    cp_order: Literal["head_tail", "contiguous"] = setting(
        "head_tail", "Order of a row's chunks over the ranks of cp."
    )
    cp_attention: Literal["all_gather", "ring", "heads"] = setting(
        "all_gather", "Exchange of attention over cp: gather keys, pass them round, or swap heads."
    )
    cp_mamba3: Literal["state", "heads"] = setting(
        "state", "Exchange of Mamba-3 over cp: hand states on, or swap heads."
    )
    cp_m2rnn: Literal["auto", "heads", "serial"] = setting(
        "auto", "Exchange of M2RNN over cp (auto: heads where cp divides them)."
    )
    cp_gated_deltanet: Literal["state", "heads"] = setting(
        "state", "Exchange of Gated DeltaNet over cp: hand states on, or swap heads."
    )
    ep_dispatch: Literal["per_rank", "per_expert", "padded"] = setting(
        "per_rank",
        "Copies of a token sent: to each rank chosen (with a capacity: expert), each expert, every"
        " rank.",
    )
    pp_schedule: Literal[
        "1f1b",
        "gpipe",
        "interleaved",
        "interleaved_zb",
        "looped_bfs",
        "zbv",
        "dualpipev",
        "dualpipe",
    ] = setting("1f1b", "Order of forwards and backwards in a pipeline.")


@dataclass(frozen=True)
class OptimConfig:
    """Muon on hidden matrices and AdamW on the rest, or AdamW alone."""

    name: Literal["muon_adamw", "adamw"] = setting(
        "muon_adamw", "Muon on hidden matrices with AdamW on the rest, or AdamW alone."
    )
    adamw_layers: str = setting(
        "", "Layers that AdamW updates instead of Muon, by name: wo,out_proj (empty: none)."
    )
    lr: float = setting(3e-3, "Peak learning rate of AdamW.", at_least=0)
    embed_lr: float = setting(0.0, "Peak rate of the embedding (0: lr).", at_least=0)
    head_lr: float = setting(0.0, "Peak rate of the head (0: lr).", at_least=0)
    vector_lr: float = setting(
        0.0, "Peak rate of norms, biases and other vectors (0: lr).", at_least=0
    )
    beta1: float = setting(0.9, "AdamW's decay of the first moment.", at_least=0, below=1)
    beta2: float = setting(0.95, "AdamW's decay of the second moment.", at_least=0, below=1)
    eps: float = setting(1e-8, "Term that AdamW adds to the root of the second moment.", above=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay of AdamW's matrices.", at_least=0)
    cautious_weight_decay: bool = setting(
        False, "Decay a weight only where its update shrinks it too."
    )
    adamw_state: Literal["fp32", "8bit", "4bit", "cpu_offload"] = setting(
        "fp32", "Moments of AdamW: 8 bytes a parameter, fewer by torchao, or in host memory."
    )
    muon_lr: float = setting(2e-2, "Peak learning rate of Muon.", at_least=0)
    muon_momentum: float = setting(0.95, "Muon's decay of momentum.", at_least=0, below=1)
    muon_nesterov: bool = setting(True, "Look ahead by Nesterov's rule in Muon.")
    muon_momentum_dtype: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "Type of stored momentum (auto: bf16; fp64 in fp64 runs)."
    )
    muon_weight_decay: float = setting(
        0.0, "Decoupled weight decay of Muon's matrices.", at_least=0
    )
    muon_steps: int = setting(
        5, "Newton-Schulz iterations of Muon.", "iterations", at_least=1, at_most=100
    )
    muon_coefficients: Literal["quintic", "polar_express"] = setting(
        "quintic", "Polynomials of the Newton-Schulz iterations."
    )
    muon_dtype: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "Type of Newton-Schulz and of what ranks exchange for it."
    )
    muon_scale: Literal["spectral", "rms"] = setting(
        "spectral", "Scale of Muon's update by the shape of its matrix."
    )
    muon_bucket_mib: int = setting(
        32, "Most that a rank sends at once in Muon's exchange.", "MiB", at_least=1, at_most=1 << 20
    )
    qk_clip: float = setting(
        0.0, "MuonClip: largest attention logit left alone (0: off; 100 is published).", at_least=0
    )
    schedule: Literal["cosine", "wsd", "constant"] = setting(
        "cosine", "Learning rate after warmup: cosine, flat with a linear tail (wsd), or constant."
    )
    warmup_steps: int = setting(
        0, "Steps of linear warmup (0: by warmup_ratio).", "steps", at_least=0
    )
    warmup_ratio: float = setting(
        0.03, "Part of run.steps that is warmup when warmup_steps is 0.", at_least=0, at_most=1
    )
    decay_ratio: float = setting(
        0.2, "Part of run.steps that is the tail of wsd.", at_least=0, at_most=1
    )
    final_lr_ratio: float = setting(
        0.1, "Learning rate at the end over its peak.", at_least=0, at_most=1
    )
    clip_norm: float = setting(1.0, "Largest global gradient norm (0: off).", at_least=0)


@dataclass(frozen=True)
class PrecisionConfig:
    """Types of compute and of FP8 layers; fp64 exists for proofs."""

    # A CPU computes in bf16 when told to, and slowly in fp16: to see what they do to a run.
    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = setting(
        "auto", "Type of compute (auto: bf16 on a GPU that has it, fp32 on a CPU)."
    )
    loss_scale: float = setting(
        65536.0, "First loss scale of fp16, halved by each overflow; a power of two.", above=0
    )
    loss_scale_growth: int = setting(
        2000, "Good steps in a row that double fp16's loss scale.", "steps", at_least=1
    )
    fp8: Literal["off", "torchao", "te"] = setting(
        "off", "Library of FP8 matrix products: torchao, or Transformer Engine (A and F blocks)."
    )
    fp8_layers: str = setting("AFE", "Letters of the block kinds that are in FP8.")
    fp8_ends: int = setting(
        2, "First layers, and as many last ones, that stay out of FP8.", "layers", at_least=0
    )
    # gw_hp: weight gradients aren't in FP8. Experts are scaled by row in any case.
    fp8_recipe: Literal["rowwise_with_gw_hp", "rowwise", "tensorwise"] = setting(
        "rowwise_with_gw_hp", "What has an FP8 scale of its own: a row, or a whole tensor."
    )
    # All recipes but the first, and Transformer Engine, scale over all tokens of a microbatch.
    fp8_local_scales: bool = setting(
        False, "Allow scales from a rank's own tokens, which make the loss depend on the mesh."
    )
    fp8_all_gather: bool = setting(
        False, "Have FSDP2 gather linear layers in FP8 (recipe tensorwise)."
    )


@dataclass(frozen=True)
class KernelsConfig:
    """Code of each hot operation; a backend that is named and can't run is refused."""

    attention: Literal[
        "auto", "varlen", "flex", "merged", "varlen_padded", "torch", "reference"
    ] = setting("auto", "Backend of attention (auto: the first that can run here).")
    mamba3: Literal["auto", "mamba_ssm", "tilelang", "triton", "torch", "reference"] = setting(
        "auto", "Backend of Mamba-3's scan (auto: the first that can run here)."
    )
    m2rnn: Literal["auto", "triton", "torch", "reference"] = setting(
        "auto", "Backend of M2RNN's recurrence (auto: the first that can run here)."
    )
    gated_delta_rule: Literal["auto", "fla", "triton", "torch", "reference"] = setting(
        "auto", "Backend of Gated DeltaNet's scan (auto: the first that can run here)."
    )
    short_conv: Literal["auto", "triton", "torch", "reference"] = setting(
        "auto", "Backend of the short convolutions (auto: the first that can run here)."
    )
    gates: Literal["auto", "triton", "torch", "reference"] = setting(
        "auto", "Backend of decays, gates and SwiGLU (auto: the first that can run here)."
    )
    experts: Literal["auto", "triton", "torch", "reference"] = setting(
        "auto", "Backend of the experts' products (auto: the first that can run here)."
    )
    cross_entropy: Literal["auto", "triton", "torch", "reference"] = setting(
        "auto", "Backend of head and loss (auto: the first that can run here)."
    )
    rms_norm: Literal["auto", "triton", "torch", "reference"] = setting(
        "auto",
        "Backend of RMSNorms outside of compiled blocks (auto: the first that can run here).",
    )


@dataclass(frozen=True)
class MemoryConfig:
    """Launch gate: an estimate before the start, a record of what came true, snapshots."""

    gate: Literal["on", "off"] = setting(
        "on", "Refuse a launch that doesn't fit; off: start it, and record that it doesn't."
    )
    device_gib: float = setting(
        0.0, "Memory of a device (0: what this one has).", "GiB", at_least=0, at_most=1 << 20
    )
    headroom: float = setting(
        0.10, "Part of the device that the estimate leaves free.", at_least=0, below=1
    )
    expandable_segments: bool = setting(
        True, "Let a GPU's allocator grow its segments, which wastes less between tensors."
    )
    # smoke is a candidate's trial: it ends with its last step, saves nothing and shows nothing.
    fit: Literal["off", "auto", "smoke"] = setting(
        "off", "auto: try planned settings for four steps each and train the fastest that fits."
    )
    fit_candidates: int = setting(
        3, "Sound candidates that fit=auto times; the fastest trains.", "candidates", at_least=1
    )
    calibration: str = setting(
        "runs/calibration", "Folder of what earlier estimates were off by (empty: none)."
    )
    snapshot_every: int = setting(
        1000, "Steps between snapshots of allocated memory (0: none).", "steps", at_least=0
    )
    snapshot_gap: int = setting(
        100, "Steps from a snapshot to the one it is compared with.", "steps", at_least=1
    )


@dataclass(frozen=True)
class SpeedConfig:
    """Limit of the predicted speed, beside the launch gate of memory."""

    min_mfu: float = setting(
        0.0, "Least predicted model FLOP utilisation (0: any).", at_least=0, below=1
    )
    gate: Literal["warn", "refuse", "off"] = setting(
        "warn", "What happens below it: a line in the header, no launch, or nothing."
    )


@dataclass(frozen=True)
class Config:
    """Configuration of a run; `preset` is the function that it came from."""

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
    speed: SpeedConfig = field(default_factory=SpeedConfig)

    @property
    def saves(self) -> bool:
        """Return whether the run's state is kept: a trial's and a replay's steps aren't."""
        return self.memory.fit != "smoke" and not self.run.until
