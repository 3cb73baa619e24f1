"""The whole configuration of a run as frozen dataclasses; no torch import here.

Flags are the dotted field names (`--model.depth 12`, `--optim.lr 3e-3`). A preset is a function
that returns a `Config` (megacpp/presets.py). Rules between fields live in megacpp/rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension as DeepSeek-V3 uses it (arXiv 2309.00071)."""

    original_seq_len: int = 4096
    factor: float = 40.0
    beta_fast: int = 32
    beta_slow: int = 1
    mscale: float = 1.0


@dataclass(frozen=True)
class SparseAttentionConfig:
    """DSA: queries of some A blocks attend to the keys that an indexer chooses (2512.02556)."""

    # Which A blocks, by their rank among A blocks: "1,2,3" or "all" (empty: none).
    layers: str = ""
    top_k: int = 256  # keys of a query
    num_heads: int = 8  # of the indexer
    head_dim: int = 64
    # Of every so many sparse blocks the first chooses keys, the others take its choice.
    share: int = 1
    own: str = ""  # ranks that choose for themselves beside those (first of a pipeline stage, ...)
    # dense: all keys are attended to, and nothing but the indexers is trained, on their loss.
    stage: Literal["sparse", "dense"] = "sparse"
    loss: float = 1e-3  # of the divergence between what is attended to and what is chosen


@dataclass(frozen=True)
class AttentionConfig:
    """A blocks. `gqa`: grouped-query; `mla`: DeepSeek multi-head latent attention."""

    kind: Literal["gqa", "mla"] = "gqa"
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 500_000.0
    qk_norm: bool = False
    softcap: float | None = None  # tanh soft cap on attention logits (None: off)
    q_lora_rank: int = 0  # MLA only; 0 projects queries directly
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    yarn: YarnConfig | None = None
    max_seq_len: int = 4096  # YaRN applies only beyond yarn.original_seq_len
    sparse: SparseAttentionConfig = field(default_factory=SparseAttentionConfig)


@dataclass(frozen=True)
class Mamba3Config:
    """M blocks: Mamba-3 (arXiv 2603.15569), SISO when mimo_rank is 1."""

    d_state: int = 64
    expand: int = 2
    headdim: int = 64
    ngroups: int = 1
    mimo_rank: int = 1
    rope_fraction: float = 0.5
    a_activation: Literal["heavy_tail", "softplus"] = "heavy_tail"
    a_floor: float = 1e-4
    out_norm: bool = False
    conv_kernel: int = 0  # 0: none (author Mamba-3); 4: short conv + SiLU on x, B, C
    chunk_size: int = 64
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4


@dataclass(frozen=True)
class M2RNNConfig:
    """R blocks: M2RNN (arXiv 2603.14360). 0 heads: max(1, dim // (key_dim + value_dim))."""

    num_heads: int = 0
    num_q_heads: int = 1
    num_k_heads: int = 1
    key_dim: int = 64
    value_dim: int = 16
    conv_kernel: int = 4
    gradient_clip: float | None = 1.0  # bound on each entry of the state gradient (None: off)
    clip_mode: Literal["total", "carried"] = "carried"  # upstream torch clips the total
    chunk_size: int = 64


@dataclass(frozen=True)
class MoEConfig:
    """E blocks: token-choice mixture of experts with optional shared experts."""

    num_experts: int = 8
    top_k: int = 2
    hidden_dim: int = 256
    activation: Literal["swiglu", "relu2"] = "swiglu"  # routed experts
    num_shared: int = 1
    shared_hidden_dim: int = 256  # per shared expert; always SwiGLU
    shared_gate: bool = False  # sigmoid gate on the shared output
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    softmax_order: Literal["pre", "post"] = "post"  # softmax before or after the top-k choice
    route_scale: float = 1.0
    num_groups: int = 1  # of experts, as the nodes that hold them; a token visits top_k_groups
    top_k_groups: int = 1
    # Part of the chosen slots that go to real experts (1: all); the rest go to null experts, which
    # compute nothing. Then a token chooses top_k / null_rho slots, top_k real ones on average.
    null_rho: float = 1.0
    load_warning: float = 4.0  # busiest expert over the mean of its layer that is worth a warning
    bias_update_rate: float = 1e-3  # selection-only bias, sigmoid scores (0: no bias)
    capacity_factor: float | None = None  # None: dropless
    balance_loss: float = 0.0  # Switch loss over the microbatch
    sequence_loss: float = 0.0  # the same per document
    z_loss: float = 0.0


@dataclass(frozen=True)
class MLPConfig:
    """F blocks: a dense feed-forward."""

    hidden_dim: int = 1024
    activation: Literal["swiglu", "relu2"] = "swiglu"


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction: further tokens from the last hidden states (2412.19437)."""

    depths: int = 0  # tokens beyond the next (0: off)
    shared: bool = True  # one block for all depths (FastMTP, 2509.18362), or one for each
    loss: float = 0.3  # of the weighted mean over depths
    loss_final: float = 0.3  # the same after `switch`
    switch: float = 1.0  # part of run.steps after which loss_final takes over
    beta: float = 0.6  # depth k weighs beta^k, normalised (1: all alike)
    order: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"
    hidden: Literal["pre_norm", "post_norm"] = "pre_norm"  # of trunk and depths, before their norm
    hidden_dim: int = 0  # of the block's feed-forward (0: 4 * dim, that of SwiGLU two thirds)
    detach_trunk: bool = False  # the trunk learns nothing from it
    detach_head: bool = False  # neither does the head


@dataclass(frozen=True)
class TOPConfig:
    """Token order prediction: which tokens come sooner (2508.19228)."""

    loss: float = 0.0  # 0: off
    window: int = 2048  # tokens ahead that count


@dataclass(frozen=True)
class NgramConfig:
    """Hashed n-grams, looked up and added to the token embedding; zero at the start."""

    heads: int = 0  # tables of each order (0: off)
    max_order: int = 3  # orders 2 to this one
    table_size: int = 500_000  # each table has the next prime number of rows that is unused
    dim: int = 16  # of a row
    lr_factor: float = 5.0  # of optim.embed_lr, for the tables


@dataclass(frozen=True)
class EngramConfig:
    """Engram: gated memories of hashed n-grams in front of some A blocks (2601.07372)."""

    layers: str = ""  # by rank among A blocks: "0,4" or "all" (empty: none)
    heads: int = 8  # tables of each order
    max_order: int = 3  # orders 2 to this one
    table_size: int = 100_000
    dim: int = 256  # of all heads of one order together
    conv_kernel: int = 4  # taps max_order tokens apart
    seed: int = 0  # of the hashes, which are part of what is learned
    lr_factor: float = 5.0  # of optim.embed_lr, for the tables


@dataclass(frozen=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections: several residual streams (mHC, 2512.24880)."""

    streams: int = 1  # 1: off
    ordering: Literal["paper", "deepseek_v4", "megatron"] = "paper"
    iterations: int = 20  # of Sinkhorn
    # plain: the model at step 0 is the one without; published: as in the ordering's source.
    init: Literal["plain", "published"] = "plain"
    collapse: Literal["mean", "sum"] = "mean"  # of the streams behind the last block


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid: `pattern` letters (A M E R F) tiled to `depth`; `|` marks pipeline cuts."""

    dim: int = 256
    depth: int = 12
    pattern: str = "AEMEAEMEAEMR"
    vocab_size: int = 4096
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    logit_softcap: float | None = None
    z_loss: float = 0.0
    init_std: float = 0.02
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mamba3: Mamba3Config = field(default_factory=Mamba3Config)
    m2rnn: M2RNNConfig = field(default_factory=M2RNNConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    top: TOPConfig = field(default_factory=TOPConfig)
    ngram: NgramConfig = field(default_factory=NgramConfig)
    engram: EngramConfig = field(default_factory=EngramConfig)
    mhc: HyperConnectionConfig = field(default_factory=HyperConnectionConfig)

    @property
    def looks_around(self) -> bool:
        """Something reads tokens of a row beside its own."""
        return bool(self.mtp.depths or self.top.loss or self.ngram.heads or self.engram.layers)


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
    """`auto`: bf16 compute on a GPU that has it, fp32 on CPU. fp64 exists for proofs."""

    dtype: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    # Loss scale of fp16: halved by a step that overflows, doubled after so many good ones.
    loss_scale: float = 65536.0
    loss_scale_growth: int = 2000
    # Matrix products of A and F blocks in FP8: by torchao, or by Transformer Engine.
    fp8: Literal["off", "torchao", "te"] = "off"


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
    fp8_wrapper: Literal["te_checkpoint", "torchao"] = "te_checkpoint"
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
    recompute: CheckpointingPolicy = field(default_factory=CheckpointingPolicy)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
